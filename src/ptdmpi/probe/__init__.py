"""What this machine does: kernels, messages and whole layers, measured into a cluster file.

All ranks measure at once, for they share memory and cores as they will in training, and every
result is checked. The file that comes out is one that `ptdmpi plan --cluster FILE` reads.
"""
