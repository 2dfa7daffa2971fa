"""Offline preprocessing of training data (`ptdmpi-data`): text files are converted to token
shards."""
