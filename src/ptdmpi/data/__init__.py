"""Token shards, the order of training samples, and microbatches.

The package needs numpy and h5py, but neither torch nor MPI.
"""

import os

# Lustre and GPFS often refuse HDF5's locks, and a shard is read-only once it has its name.
# The HDF5 library reads this variable when h5py is first imported, so it is set here.
os.environ.setdefault("HDF5_USE_FILE_LOCKING", "FALSE")
