"""Planning: the process grid, schedules, message programs, simulation and pictures.

This package does not import torch, mpi4py or h5py. Matplotlib is imported only while a picture is
drawn.
"""
