"""A trainer of large language models over MPI (PTD-P: Narayanan et al. 2021, arXiv 2104.04473)."""

__version__ = "0.3.0"
