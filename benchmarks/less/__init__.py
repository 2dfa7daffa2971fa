"""Benchmarks of communication-efficient data-parallel methods: their theory in matrix form, and the
training of a small GPT."""
