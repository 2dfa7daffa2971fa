"""The implementation of `ptdmpi-data chat` and `ptdmpi-data pairs`. Both commands make shards of
conversations. Only the tokens of answers are labels of the loss."""
