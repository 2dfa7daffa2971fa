"""Measurements of a machine: the rates of its kernels, the times of messages, and the times of
complete layers. They are written to a cluster file.

All ranks measure at the same time, because in training they also share memory and cores. Every
computed result is compared with the right result. `ptdmpi plan --cluster FILE` reads the cluster
file.
"""
