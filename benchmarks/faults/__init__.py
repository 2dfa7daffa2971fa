"""Benchmarks with faults: runs that are killed, damaged or left without disk space, and the cost of
saving checkpoints."""
