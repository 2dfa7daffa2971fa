"""Token shards, the order of training samples, and microbatches: numpy and h5py, no torch, no
MPI."""

import os

# Lustre and GPFS often refuse HDF5's locks, and a shard is read-only once it has its name.
# It stands here because the HDF5 library reads the variable when h5py is first imported.
os.environ.setdefault("HDF5_USE_FILE_LOCKING", "FALSE")
