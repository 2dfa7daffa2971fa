"""This project beside plain torch: `python -m benchmarks.bench`."""
