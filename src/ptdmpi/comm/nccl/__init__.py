"""The `nccl` transport: NCCL communicators, which are connected with the help of MPI."""
