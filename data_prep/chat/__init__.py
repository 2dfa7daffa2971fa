"""The implementation of `ptdmpi-data chat` and `ptdmpi-data pairs`. They make shards of
conversations in which only the tokens of answers are labels of the loss."""
