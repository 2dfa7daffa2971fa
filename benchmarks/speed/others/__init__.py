"""Other trainers of the same GPT. Each file has the trainer of one rank."""
