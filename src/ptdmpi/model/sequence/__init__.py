"""The division of sequences over ranks (context parallelism): the positions of each rank, and
attention to the keys of all ranks."""
