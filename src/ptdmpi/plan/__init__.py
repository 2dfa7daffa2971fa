"""The planning of a training run: process grid, pipeline schedules, simulated steps and pictures.

This package does not import torch, mpi4py or h5py. Matplotlib is imported only while a picture is
drawn.
"""
