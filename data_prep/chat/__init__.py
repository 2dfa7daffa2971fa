"""`ptdmpi-data chat`: conversations to shards, of which only answers count."""
