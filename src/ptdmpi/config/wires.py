"""Wires by name: what `comm.wire` may say, and where the class of each is.

A wire is one class, a `Communicator` that keeps the contract, and one entry in `WIRES`. The class
is imported when a world is split, so that a plan is made without torch and MPI.
"""

from collections.abc import Iterator

AUTO = "auto"
# name -> "module:class"
WIRES = {
    "mpi": "ptdmpi.comm.mpi:MpiCommunicator",
    "nccl": "ptdmpi.comm.nccl.wire:NcclCommunicator",
    "torch": "ptdmpi.comm.torch_dist:TorchCommunicator",
}


def wire_mistakes(name: str) -> Iterator[str]:
    """Yield the mistake in `comm.wire = name`, as one line; nothing if it is legal."""
    if name != AUTO and name not in WIRES:
        legal = ", ".join(f'"{known}"' for known in (AUTO, *WIRES))
        yield f'comm.wire = "{name}": no such wire; legal: {legal}'
