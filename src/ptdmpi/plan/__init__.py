"""Planning: the process grid, schedules, message programs, simulation and pictures.

This package does not import torch, mpi4py or h5py. It imports matplotlib only while it draws.
"""
