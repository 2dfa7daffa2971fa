"""Measurement of this machine's kernels, messages and whole layers, as a cluster file.

All ranks measure at once, because in training they share memory and cores as well. Every result is
checked. `ptdmpi plan --cluster FILE` reads the file.
"""
