"""Outputs of `make bench`: a picture of the measurements, and a table of scaling efficiency."""
