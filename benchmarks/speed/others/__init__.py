"""Other trainers, one a file, around the same GPT: what a rank of each does."""
