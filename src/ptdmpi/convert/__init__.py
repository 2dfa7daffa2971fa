"""Conversion from and to Hugging Face models; needs no MPI, no GPU and no `transformers`."""
