"""Other trainers, each in one file, for the same GPT: the trainer of one rank."""
