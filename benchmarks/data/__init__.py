"""Benchmarks of reading, writing and tokenizing data."""
