"""The backend "ptdmpi" of torch.distributed: process groups whose messages are sent by the
transports of this package.

After `import ptdmpi.comm.c10d`, `torch.distributed.init_process_group("ptdmpi")` takes the ranks
from MPI, without an address, a port or environment variables. DeviceMesh, DTensor, FSDP2 and
distributed checkpoints (DCP) then work under plain mpirun or srun. The transport is MPI on hosts
and NCCL on NVIDIA's GPUs (`comm.wires.preferred`). With the `mpi` transport, the terms of a sum are
added in ascending order of ranks.
"""

from ptdmpi.comm.c10d.start import mesh_of, register

__all__ = ["mesh_of"]

register()
