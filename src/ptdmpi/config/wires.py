"""Wires by name: what `comm.wire` may say, and where the class of each is.

A wire is one class, a `Communicator` that keeps the contract, and one entry in `WIRES`. The class
is imported when a world is split, so that a plan is made without torch and MPI.
"""

from collections.abc import Iterator

AUTO = "auto"
# name -> "module:class", in the order in which "auto" prefers them
WIRES = {"mpi": "ptdmpi.comm.mpi:MpiCommunicator"}
# Names that people rightly expect, and why they are refused.
MISSING = {
    "nccl": "not built yet: tensors of a GPU travel through MPI, staged on the host",
    "torch": "not built yet: tensors travel through MPI",
}


def wire_mistakes(name: str) -> Iterator[str]:
    """What is wrong with `comm.wire = name`, as one line; nothing if it is legal."""
    if name != AUTO and name not in WIRES:
        legal = ", ".join(f'"{known}"' for known in (AUTO, *WIRES))
        reason = MISSING.get(name, "no such wire")
        yield f'comm.wire = "{name}": {reason}; legal: {legal}'
