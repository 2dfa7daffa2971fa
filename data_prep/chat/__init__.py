"""The implementation of `ptdmpi-data chat`: shards of conversations, in which only answers count as
labels."""
