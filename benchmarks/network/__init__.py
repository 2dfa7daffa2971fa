"""Benchmarks of training over a slow link, between several simulated nodes on one machine."""
