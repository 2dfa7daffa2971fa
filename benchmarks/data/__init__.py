"""The speed of reading, writing and tokenizing data."""
