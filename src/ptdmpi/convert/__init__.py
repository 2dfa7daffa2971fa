"""Conversion of models from and to the format of Hugging Face. The conversion needs no MPI, no GPU
and no `transformers`."""
