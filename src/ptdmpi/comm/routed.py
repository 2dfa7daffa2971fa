"""The base class of the transports for devices. A library such as NCCL sends tensors that are on a
device, and MPI sends tensors that are on the host.

The messages of one connection are sent one after the other. Each pair of neighbours in the pipeline
therefore has one connection per direction, so that messages in the two directions do not wait for
each other.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ptdmpi.comm.clock import HOST, Clock
from ptdmpi.comm.communicator import Communicator, Exchanged, Handle

if TYPE_CHECKING:  # not imported at run time, because importing mpi4py.MPI initialises MPI
    from mpi4py import MPI

PIPELINE = "pipeline"
Pair = tuple[int, int]  # a directed pair: (sender, receiver)


class Carrier(Protocol):
    """The interface of a library that sends flat tensors on a device between the ranks of one
    group."""

    def reaches(self, flat: Tensor) -> bool:
        """Return True if the tensor is on the device that this library uses."""

    def all_reduce(self, flat: Tensor, op: str) -> Handle:
        """Begin to replace `flat` by its sum (`op` is "sum") or maximum ("max") over the ranks of
        the group."""

    def all_gather(self, result: Tensor, flat: Tensor) -> Handle:
        """Begin to fill `result` with the tensors `flat` of all ranks, in rank order."""

    def reduce_scatter(self, result: Tensor, flat: Tensor) -> Handle:
        """Begin to fill `result` with this rank's part of the sum of `flat` over the ranks."""

    def all_to_all(self, result: Tensor, flat: Tensor, parts: Exchanged) -> Handle:
        """Begin to send the parts of `flat` to the ranks, and to receive the parts of `result`."""

    def broadcast(self, flat: Tensor, root: int) -> Handle:
        """Begin to replace `flat` by the tensor of rank `root`."""

    def isend(self, flat: Tensor, peer: int) -> Handle:
        """Begin to send `flat` to rank `peer`."""

    def irecv(self, flat: Tensor, peer: int) -> Handle:
        """Begin to receive `flat` from rank `peer`."""

    def pending(self) -> str:
        """Return the name of the collective that the device executes, or ""; see
        `Communicator.pending`."""

    def failure(self) -> str:
        """Return the error of the connection, or ""; see `Communicator.failure`."""

    def abort(self) -> None:
        """End all operations of this rank that are in progress; no further operation can begin."""


class RoutedCommunicator(Communicator):
    """A group in which a carrier (a library such as NCCL) sends tensors that are on a device, and
    MPI sends tensors that are on the host. A group of one rank has no carrier.
    """

    overlaps = True

    def __init__(self, control: "MPI.Comm", clock: Clock = HOST, group: str = "") -> None:
        from ptdmpi.comm.mpi import MpiCommunicator

        super().__init__(control, clock, group)
        self.host = MpiCommunicator(control, clock, group)
        pairs = tuple(neighbour_pairs(self.size)) if group == PIPELINE else ()
        self._carrier = self._connect(pairs) if self.size > 1 else None

    @abstractmethod
    def _connect(self, pairs: Sequence[Pair]) -> Carrier:
        """Connect the group, and give each directed pair of ranks a separate connection. All ranks
        of the group call this method with the same pairs."""

    def _reaching(self, flat: Tensor) -> Carrier | None:
        return self._carrier if self._carrier is not None and self._carrier.reaches(flat) else None

    def pending(self) -> str:
        """Return the name of the operation that the device executes, or ""."""
        return "" if self._carrier is None else self._carrier.pending()

    def failure(self) -> str:
        """Return the error of an operation that has failed on the device, or ""."""
        return "" if self._carrier is None else self._carrier.failure()

    def abort(self) -> None:
        """Abort the operations that are in progress on the device. Any thread may call this
        method."""
        if self._carrier is not None:
            self._carrier.abort()

    def _all_reduce(self, flat: Tensor, op: str) -> Handle:
        if op not in ("sum", "max"):
            raise ValueError(f"op is sum or max, not {op}")
        if (carrier := self._reaching(flat)) is None:
            return self.host._all_reduce(flat, op)
        return carrier.all_reduce(flat.detach(), op)

    def _all_gather(self, result: Tensor, flat: Tensor) -> Handle:
        if (carrier := self._reaching(flat)) is None:
            return self.host._all_gather(result, flat)
        return carrier.all_gather(result, flat.detach())

    def _reduce_scatter(self, result: Tensor, flat: Tensor) -> Handle:
        if (carrier := self._reaching(flat)) is None:
            return self.host._reduce_scatter(result, flat)
        return carrier.reduce_scatter(result, flat.detach())

    def _all_to_all(self, result: Tensor, flat: Tensor, parts: Exchanged) -> Handle:
        if (carrier := self._reaching(flat)) is None:
            return self.host._all_to_all(result, flat, parts)
        return carrier.all_to_all(result, flat.detach(), parts)

    def _broadcast(self, flat: Tensor, root: int) -> Handle:
        if (carrier := self._reaching(flat)) is None:
            return self.host._broadcast(flat, root)
        return carrier.broadcast(flat.detach(), root)

    def _isend(self, flat: Tensor, peer: int) -> Handle:
        if (carrier := self._reaching(flat)) is None:
            return self.host._isend(flat, peer)
        return carrier.isend(flat.detach(), peer)

    def _irecv(self, flat: Tensor, peer: int) -> Handle:
        if (carrier := self._reaching(flat)) is None:
            return self.host._irecv(flat, peer)
        return carrier.irecv(flat.detach(), peer)


def neighbour_pairs(size: int) -> Iterator[Pair]:
    """Yield the directed pairs of neighbours in a pipeline of `size` ranks. The last rank and the
    first rank are neighbours, too: if each rank has several stages, the last rank sends the output
    of a stage to the first rank. If each rank connects its own pairs one after the other, in the
    yielded order, the ranks cannot deadlock.

    The reason is the following. Take the first pair in this order that is not yet connected. Its
    two ranks have connected all their earlier pairs, so they can connect this pair now. Pairs
    without a common rank connect at the same time.
    """
    ring = [(rank, (rank + 1) % size) for rank in range(size if size > 2 else size - 1)]
    for sender, receiver in (*ring[::2], *ring[1::2]):
        yield sender, receiver
        yield receiver, sender
