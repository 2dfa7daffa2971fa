"""Other trainers, one a file, around the same GPT: the work of one rank."""
