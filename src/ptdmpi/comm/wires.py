"""The choice of the transport of a run. The key `comm.wire` names a transport, and the `Wire` of
this name makes communicators. No other module chooses the transport."""

from dataclasses import dataclass

import torch
from mpi4py import MPI

from ptdmpi.base.plugins import built_in
from ptdmpi.comm.clock import HOST, Clock, clock_of
from ptdmpi.comm.communicator import Communicator
from ptdmpi.comm.nccl.library import installed
from ptdmpi.config import InputError
from ptdmpi.config.wires import AUTO, WIRES, wire_mistakes

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Wire:
    """A transport of tensors between ranks. The transport makes one communicator for each group of
    a process grid.

    `World.split` calls `connect` on all ranks of a group, for one group after the other, in the
    same order on every rank. `control` is an MPI communicator of the ranks of the group, which all
    of these ranks can already use. While a transport connects, it can therefore send messages
    through `control`, such as a unique id or an error of rank 0.
    """

    kind: type[Communicator]
    clock: Clock = HOST
    device: torch.device = CPU
    remark: str = ""

    def open(self, everyone: MPI.Comm) -> str:
        """Prepare the transport. All ranks of a world call this method once, before the groups are
        connected. Return a remark for the log."""
        return self.kind.open(everyone, self.device) or self.remark

    def connect(self, control: MPI.Comm, group: str) -> Communicator:
        """Return this rank's communicator of `group`, such as "tensor" or "replicas"."""
        return self.kind(control, self.clock, group)


def wire_named(name: str = AUTO, device: torch.device = CPU, clock: Clock | None = None) -> Wire:
    """Return the transport that `comm.wire` names, for ranks that compute on `device`. `clock`
    measures the time of the transport's work; the default is the clock of the device.

    Raises InputError for a name that is not in `ptdmpi.config.wires`.
    """
    for mistake in wire_mistakes(name):
        raise InputError(mistake)
    chosen, remark = preferred(device) if name == AUTO else (name, "")
    clock = clock_of(device) if clock is None else clock
    return Wire(built_in(WIRES[chosen]), clock, device, remark)


def preferred(device: torch.device) -> tuple[str, str]:
    """Return the transport that "auto" chooses for ranks that compute on `device`, and a remark for
    the log."""
    if device.type == "cuda" and torch.version.hip:
        return "torch", ""
    if device.type == "cuda" and installed():
        return "nccl", ""
    if device.type == "cpu":
        return "mpi", ""
    return "mpi", (
        f"tensors of {device.type} devices travel through MPI, staged on the host: no nccl4py "
        '(pip install ptdmpi[nccl], or comm.wire = "torch")'
    )
