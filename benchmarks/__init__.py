"""Benchmarks in eight folders. They share a launcher of ranks (`launch`), rounds in which the
compared programs alternate (`turns`), and functions that write tables into pages of docs/
(`marks`)."""
