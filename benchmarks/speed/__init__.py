"""Comparisons of ptdmpi's speed with other trainers and with the time of its matrix multiplications
alone."""
