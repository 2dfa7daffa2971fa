"""Measurements of ptdmpi alone, in the rows of the comparison: its kernels, and the parts of its
step."""
