"""The division of sequences over ranks (context parallelism): the positions of each rank, attention
to the keys of all ranks, and dropout at a rank's positions."""
