"""Measuring a machine: the rates of its kernels, the times of messages, and the times of complete
layers, which are written as a cluster file.

All ranks measure at the same time, because in training they also share memory and cores. Every
result is checked. `ptdmpi plan --cluster FILE` reads the file.
"""
