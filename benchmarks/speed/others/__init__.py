"""Other trainers of the same GPT. Each file of this folder contains one of these trainers, as the
code of one rank."""
