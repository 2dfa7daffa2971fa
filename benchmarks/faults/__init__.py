"""Benchmarks with faults: runs that are killed, damaged and starved, and the cost of saving."""
