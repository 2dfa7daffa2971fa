"""The `nccl` wire: communicators of NCCL, bootstrapped from those of MPI."""
