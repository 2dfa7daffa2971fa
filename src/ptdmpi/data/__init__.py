"""Token shards, the order of training samples, and the reading of microbatches.

The package `ptdmpi.data` needs numpy and h5py, but neither torch nor MPI.
"""

import os

# The file systems Lustre and GPFS often refuse HDF5's locks. Reading needs no locks, because a
# shard does not change after it has its final name. The HDF5 library reads this variable when h5py
# is first imported, so the variable is set before that import.
os.environ.setdefault("HDF5_USE_FILE_LOCKING", "FALSE")
