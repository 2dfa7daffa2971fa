"""The `nccl` transport (`wire`): NCCL communicators, which are set up through MPI communicators."""
