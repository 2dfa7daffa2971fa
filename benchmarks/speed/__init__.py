"""Comparisons of ptdmpi's speed with the speed of other trainers, and with the time of its matrix
multiplications alone."""
