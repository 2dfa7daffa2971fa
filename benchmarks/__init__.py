"""Benchmarks in eight folders. The benchmarks share a launcher (`launch`), rounds in which the
compared sides alternate (`turns`), and tables in pages of docs/ (`marks`)."""
