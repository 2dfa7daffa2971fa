"""Wires for tests: those of the trainer, and one that is as unlike `mpi` as a device's would be."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from ptdmpi.comm.clock import HOST, Mark
from ptdmpi.comm.communicator import Communicator, Exchanged, Handle
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.comm.torch_dist import TorchCommunicator
from ptdmpi.config import wires as config
from ptdmpi.model.sharded import Walk
from tests.comm._stand_in import StandInCommunicator

OPS = {"sum": MPI.SUM, "max": MPI.MAX}
HALF = (torch.bfloat16, torch.float16)


class Later:
    """A request whose result is in its place only after a wait."""

    def __init__(self, request: MPI.Request, arrived: Tensor, target: Tensor) -> None:
        self.request, self.arrived, self.target = request, arrived, target

    def wait(self) -> None:
        """Wait, and put the result into its place."""
        self.request.Wait()
        self.target.copy_(self.arrived)

    def done(self) -> bool:
        """Return True if the request is complete; then put the result into its place."""
        finished = self.request.Test()
        if finished:
            self.target.copy_(self.arrived)
        return finished


class FastCommunicator(Communicator):
    """MPI's own sums, begun and waited for: in whatever order MPI likes, so not exact."""

    def _all_reduce(self, flat: Tensor, op: str) -> Handle:
        if op not in OPS:
            raise ValueError(f"op is sum or max, not {op}")
        wide = _wide(flat)
        request = self.control.Iallreduce(MPI.IN_PLACE, wide.numpy(), OPS[op])
        return Later(request, wide, flat)

    def _all_gather(self, result: Tensor, flat: Tensor) -> Handle:
        arrived = torch.empty_like(result)
        return Later(self.control.Iallgather(_bytes(flat), _bytes(arrived)), arrived, result)

    def _reduce_scatter(self, result: Tensor, flat: Tensor) -> Handle:
        wide = _wide(flat)
        # not MPI's own: Open MPI 5.0's Ireduce_scatter_block gives wrong sums
        request = self.control.Iallreduce(MPI.IN_PLACE, wide.numpy(), MPI.SUM)
        return Later(request, wide.chunk(self.size)[self.rank], result)

    def _all_to_all(self, result: Tensor, flat: Tensor, parts: Exchanged) -> Handle:
        arrived = torch.empty_like(result)
        size = flat.element_size()
        request = self.control.Ialltoallv(
            [_bytes(flat), [size * n for n in parts.sent], MPI.BYTE],
            [_bytes(arrived), [size * n for n in parts.received], MPI.BYTE],
        )
        return Later(request, arrived, result)

    def _broadcast(self, flat: Tensor, root: int) -> Handle:
        arrived = flat.detach().clone()
        return Later(self.control.Ibcast(_bytes(arrived), root), arrived, flat)

    def _isend(self, flat: Tensor, peer: int) -> Handle:
        kept = flat.detach().clone()
        return Later(self.control.Isend(_bytes(kept), peer), kept, kept)

    def _irecv(self, flat: Tensor, peer: int) -> Handle:
        arrived = torch.empty_like(flat)
        return Later(self.control.Irecv(_bytes(arrived), peer), arrived, flat)


class Unfinished(Later):
    """A request that is in progress until `wait`. `dropped`: how many were freed without a wait."""

    dropped = 0
    over = False

    def wait(self) -> None:
        """Wait, and note it."""
        super().wait()
        self.over = True

    def done(self) -> bool:
        """Return True after a wait only."""
        return self.over

    def __del__(self) -> None:
        Unfinished.dropped += not self.over


class SlowCommunicator(FastCommunicator):
    """Gathers and reductions are never over by themselves."""

    def _all_gather(self, result: Tensor, flat: Tensor) -> Handle:
        return _slow(super()._all_gather(result, flat))

    def _reduce_scatter(self, result: Tensor, flat: Tensor) -> Handle:
        return _slow(super()._reduce_scatter(result, flat))


def _slow(begun: Later) -> Unfinished:
    return Unfinished(begun.request, begun.arrived, begun.target)


def out_of_luck() -> Callable[[Walk, str | None], None]:
    """`Walk.backward`, of which the third call fails: the gradient of the last place is being
    reduced, and the weights of those to come are on their way."""
    places: list[str | None] = []
    usual = Walk.backward

    def backward(walk: Walk, place: str | None) -> None:
        places.append(place)
        if len(places) == 3:
            raise RuntimeError("out of luck")
        usual(walk, place)

    return backward


def _wide(flat: Tensor) -> Tensor:
    return flat.detach().to(torch.float32 if flat.dtype in HALF else flat.dtype, copy=True)


def _bytes(flat: Tensor):
    return flat.detach().view(torch.uint8).numpy()


@contextmanager
def registered() -> Iterator[None]:
    """The one entry that each of these costs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fast", "slow"):
            patch.setitem(config.WIRES, name, f"{__name__}:{name.title()}Communicator")
        yield


# Every wire that must keep the contract: a new one is one more entry.
WIRES: dict[str, type[Communicator]] = {
    "mpi": MpiCommunicator,
    "torch": TorchCommunicator,
    "stand_in": StandInCommunicator,
    "fast": FastCommunicator,
}


def connect(wire: str, comm: MPI.Comm) -> Communicator:
    """All ranks of `comm` as a group on a wire: the pipeline's, whose messages go between
    neighbours."""
    kind = WIRES[wire]
    if kind in (TorchCommunicator, StandInCommunicator) and comm.Get_size() > 4:
        pytest.skip("threads of their own on few cores: 4 ranks have all that 8 have")
    kind.open(comm, torch.device("cpu"))
    return kind(comm, HOST, "pipeline")


class LateMark:
    """A mark that may be read only after its clock has settled."""

    def __init__(self, clock: "LateClock") -> None:
        self.clock, self.number = clock, clock.marks

    def done(self) -> bool:
        """Return True if the clock has settled since the mark."""
        return self.number <= self.clock.settled

    def at_s(self) -> float:
        """Return the number of the mark as its time."""
        assert self.done(), "read before the device was waited for"
        return float(self.number)


class LateClock:
    """A clock like that of a device far behind its host: its n-th mark is at n seconds."""

    def __init__(self) -> None:
        self.marks = self.settled = self.settles = 0

    def mark(self) -> Mark:
        """Return the next mark."""
        self.marks += 1
        return LateMark(self)

    def settle(self) -> None:
        """Let all marks so far be done, and count the call."""
        self.settled = self.marks
        self.settles += 1
