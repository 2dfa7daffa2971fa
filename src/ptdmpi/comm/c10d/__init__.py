"""The backend "ptdmpi" of torch.distributed: process groups over the transports of this package.

After `import ptdmpi.comm.c10d`, `torch.distributed.init_process_group("ptdmpi")` starts from MPI,
without an address, a port or environment variables. DeviceMesh, DTensor, FSDP2 and distributed
checkpoints (DCP) then run under plain mpirun or srun. The transport is MPI on hosts and NCCL on
NVIDIA's GPUs (`comm.wires.preferred`). The `mpi` transport computes sums in ascending rank order.
"""

from ptdmpi.comm.c10d.start import register

register()
