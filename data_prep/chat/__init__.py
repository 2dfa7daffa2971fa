"""The implementation of `ptdmpi-data chat`: shards of conversations, in which only the tokens of
answers are labels of the loss."""
