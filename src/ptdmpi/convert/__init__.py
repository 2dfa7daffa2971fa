"""Models of Hugging Face, both ways; without MPI, a GPU, or `transformers`."""
