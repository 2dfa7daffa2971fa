"""The division of a sequence over ranks: the positions of each rank, and attention to the keys of
all ranks."""
