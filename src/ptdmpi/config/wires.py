"""The legal names of transports (`comm.wire`), and the class of each transport.

A transport needs a subclass of `Communicator` and an entry in `WIRES`. The class is imported only
when communicators are made, so planning needs neither torch nor MPI.
"""

from collections.abc import Iterator

AUTO = "auto"
# Name of a transport -> its class, as "module:class".
WIRES = {
    "mpi": "ptdmpi.comm.mpi:MpiCommunicator",
    "nccl": "ptdmpi.comm.nccl.wire:NcclCommunicator",
    "torch": "ptdmpi.comm.torch_dist:TorchCommunicator",
}


def wire_mistakes(name: str) -> Iterator[str]:
    """Yield the mistake in `comm.wire = name`, as one line; yield nothing if the name is legal."""
    if name != AUTO and name not in WIRES:
        legal = ", ".join(f'"{known}"' for known in (AUTO, *WIRES))
        yield f'comm.wire = "{name}": no such transport; legal: {legal}'
