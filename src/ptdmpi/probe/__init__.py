"""Measurements of a machine: the rates of its kernels, the times of messages, and the times of
complete layers. The results are written to a cluster file.

All ranks measure at the same time, because ranks on one node also share memory and cores in
training. Every computed result is compared with the right result. `ptdmpi plan --cluster FILE`
reads the cluster file.
"""
