"""Offline preprocessing: text files to token shards (`ptdmpi-data`)."""
