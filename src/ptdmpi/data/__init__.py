"""Token shards, the order of training samples, and the reading of microbatches.

The package `ptdmpi.data` needs numpy and h5py, but neither torch nor MPI.
"""

import os

# Lustre and GPFS often refuse HDF5's locks, and a shard is never changed once it has its final
# name. The HDF5 library reads this variable when h5py is first imported, so it is set here.
os.environ.setdefault("HDF5_USE_FILE_LOCKING", "FALSE")
