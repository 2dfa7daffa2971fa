"""Planning: the process grid, schedules, message programs, simulation and pictures.

Imports neither torch, mpi4py nor h5py, and matplotlib only while it draws.
"""
