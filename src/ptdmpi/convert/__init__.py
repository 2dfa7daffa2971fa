"""Conversion of models from and to the format of Hugging Face. It needs no MPI, no GPU and no
`transformers`."""
