"""From the name of a wire to what makes communicators: the one place where wires are chosen."""

import importlib
from dataclasses import dataclass

from mpi4py import MPI

from ptdmpi.comm.clock import HOST, Clock
from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import InputError
from ptdmpi.config.wires import AUTO, WIRES, wire_mistakes


@dataclass(frozen=True)
class Wire:
    """What makes the communicators of the data plane: one for each group of a grid.

    `World.split` calls it on all ranks of a group, group after group in one order everywhere, each
    with an MPI communicator of exactly these ranks, which has been through a barrier. So a wire
    can exchange over it what its own connection needs (a unique id, an error of rank 0).
    """

    kind: type[Communicator]
    clock: Clock = HOST

    def connect(self, control: MPI.Comm, group: str) -> Communicator:
        """This rank's end of `group`, such as "tensor" or "replicas"."""
        return self.kind(control, self.clock, group)


def wire_named(name: str = AUTO, clock: Clock = HOST) -> Wire:
    """The wire that `comm.wire` names; its work is timed by `clock`.

    Raises InputError for a name that is not in `ptdmpi.config.wires`.
    """
    for mistake in wire_mistakes(name):
        raise InputError(mistake)
    chosen = next(iter(WIRES)) if name == AUTO else name
    module, _, kind = WIRES[chosen].partition(":")
    return Wire(getattr(importlib.import_module(module), kind), clock)
