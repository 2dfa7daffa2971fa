"""Measurement of this machine's kernels, messages and whole layers, as a cluster file.

All ranks measure at once, since they share memory and cores as they will in training, and every
result is checked. `ptdmpi plan --cluster FILE` reads the file.
"""
