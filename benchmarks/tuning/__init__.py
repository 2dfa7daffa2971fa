"""Benchmarks of adapting models to a task: memory, time and losses."""
