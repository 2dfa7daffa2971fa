"""Offline preprocessing of data (`ptdmpi-data`): from text files to token shards."""
