"""The interface of communicators: the operations that a transport (a library that sends messages)
must offer to the rest of ptdmpi.

A communicator is one rank's view of a group of ranks, such as an axis of the process grid. In a
group of one rank the same code runs without communication. Tensors must be contiguous. A rank may
begin a collective and wait for it later: `all_reduce_begin(x)` returns a handle. Until the rank
calls `wait` of this handle, the rank may do any work that does not use x. All ranks begin the same
collectives in the same order.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
from torch import Tensor

from ptdmpi.base.traffic import Tally
from ptdmpi.comm.clock import HOST, Clock, Total
from ptdmpi.comm.pairs import pair_order
from ptdmpi.comm.traits import WireTraits

if TYPE_CHECKING:  # importing mpi4py.MPI initialises MPI, which a run on one rank does not need
    from mpi4py import MPI


class Handle(Protocol):
    """A communication that has begun. Do not use its tensors until `wait` returns."""

    def wait(self) -> None:
        """Wait until the tensors may be used. On a device only the current stream waits."""

    def done(self) -> bool:
        """Return True if the communication is complete. The call never waits."""


class _Done:
    """The handle of an operation that is already complete when it begins."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True


DONE: Handle = _Done()


@dataclass(frozen=True)
class Exchanged:
    """The sizes of an all-to-all on one rank. The rank sends `sent[k]` elements of its flat tensor
    to rank k. Rank k sends `received[k]` elements of this rank's flat result."""

    sent: Sequence[int]
    received: Sequence[int]

    def pieces(self, result: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (view of `flat` to send, view of `result` to be filled) for each rank."""
        return zip(flat.split(list(self.sent)), result.split(list(self.received)), strict=True)


class Communicator(WireTraits, ABC):
    """One rank's view of a group of ranks, such as an axis of the process grid. `rank` is the
    number of this rank in the group, and `size` is the number of ranks in the group.

    Every transport sends objects and numbers of the host through `control`, an MPI communicator.
    `busy` names the collective that this rank executes, or is empty; any thread may read it.
    `tally` counts the bytes of tensors that this rank sends. `under_way` keeps the tensors of
    incomplete collectives, because the transport may write to them even if the code that began a
    collective has failed.
    """

    def __init__(self, control: "MPI.Comm", clock: Clock = HOST, group: str = "") -> None:
        """Store `control`, the `clock` that times collectives, and the name of the `group`."""
        self.control = control
        self.clock = clock
        self.group = group
        self.rank: int = control.Get_rank()
        self.size: int = control.Get_size()
        self.tally = Tally(self.size)
        self.busy = ""
        self._waits: Total | None = None
        self.under_way: set[_UnderWay] = set()
        # MPI communicators made from `control`; if a rank is lost, all of them are revoked together
        self.made: list[MPI.Comm] = []

    def count(self, waits: Total | None) -> None:
        """Add the time of all later collectives to `waits`; if `waits` is None, measure no time."""
        self._waits = waits

    # -- tensors ---------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Replace `tensor` (any shape) by its "sum" or "max" over the ranks, and return it."""
        self.all_reduce_begin(tensor, op).wait()
        return tensor

    def all_reduce_begin(self, tensor: Tensor, op: str = "sum") -> Handle:
        """Begin `all_reduce`: `tensor` is replaced when `wait` of the handle has returned."""
        _require(tensor)
        if self.size == 1 or not tensor.numel():
            return DONE
        return self._begin("all_reduce", self._all_reduce, tensor.view(-1), op)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, [n, ...] each, in rank order: [size n, ...]."""
        result, handle = self.all_gather_begin(tensor)
        handle.wait()
        return result

    def all_gather_begin(self, tensor: Tensor) -> tuple[Tensor, Handle]:
        """Begin `all_gather`; the result, [size n, ...], is complete when `wait` of its handle has
        returned."""
        _require(tensor)
        if self.size == 1:
            return tensor, DONE
        result = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        flat = tensor.view(-1)
        return result, self._begin("all_gather", self._all_gather, result.view(-1), flat)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Sum `tensor`, [size n, ...], over the ranks. Return this rank's part [n, ...] of the
        sum."""
        result, handle = self.reduce_scatter_begin(tensor)
        handle.wait()
        return result

    def reduce_scatter_begin(self, tensor: Tensor) -> tuple[Tensor, Handle]:
        """Begin `reduce_scatter`; the result, [n, ...], is complete when `wait` of its handle has
        returned."""
        _require(tensor)
        if self.size == 1:
            return tensor, DONE
        self._has_parts(tensor)
        result = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        flat = tensor.view(-1)
        return result, self._begin("reduce_scatter", self._reduce_scatter, result.view(-1), flat)

    def all_to_all(
        self,
        tensor: Tensor,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> Tensor:
        """Exchange rows of `tensor`, [rows, ...]: the first `sent[0]` rows go to rank 0, the next
        `sent[1]` rows to rank 1, and so on.

        Returns the received rows, in rank order: `received[k]` rows from each rank k. If rank i
        sends r rows to rank k, then `received[i]` on rank k must be r; r may be 0. Without `sent`
        and `received` every rank sends the same number of rows to each rank. Raises ValueError if
        the numbers of rows do not fit the tensor or the group.
        """
        result, handle = self.all_to_all_begin(tensor, sent, received)
        handle.wait()
        return result

    def all_to_all_begin(
        self,
        tensor: Tensor,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> tuple[Tensor, Handle]:
        """Begin `all_to_all`; its result is complete when `wait` of the handle has returned."""
        _require(tensor)
        sent, received = self._rows(tensor, sent, received)
        if self.size == 1:
            return tensor, DONE
        result = tensor.new_empty((sum(received), *tensor.shape[1:]))
        row = math.prod(tensor.shape[1:])
        parts = Exchanged([row * n for n in sent], [row * n for n in received])
        # a rank without rows also calls the collective, because other ranks may exchange rows
        leaving_bytes = tensor.nbytes - parts.sent[self.rank] * tensor.element_size()
        handle = self._begin(
            "all_to_all",
            self._all_to_all,
            result.view(-1),
            tensor.view(-1),
            parts,
            counted_bytes=leaving_bytes,
        )
        return result, handle

    def _rows(
        self, tensor: Tensor, sent: Sequence[int] | None, received: Sequence[int] | None
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return the numbers of rows to send to each rank, and to receive from each rank."""
        if sent is None and received is None:
            self._has_parts(tensor)
            equal = [tensor.shape[0] // self.size] * self.size
            return equal, equal
        if sent is None or received is None:
            raise ValueError("all_to_all needs both `sent` and `received`, or neither of them")
        for counts in (sent, received):
            if len(counts) != self.size or min(counts) < 0:
                raise ValueError(f"{list(counts)} must be {self.size} numbers of rows >= 0")
        if sum(sent) != tensor.shape[0] or sent[self.rank] != received[self.rank]:
            raise ValueError(
                f"rank {self.rank} of {self.size} cannot send {list(sent)} rows of "
                f"{tuple(tensor.shape)} and receive {list(received)}"
            )
        return sent, received

    def all_gather_in_place(self, whole: Tensor) -> Handle:
        """Begin to gather `whole`, [size n, ...], which has one part [n, ...] for each rank. When
        the handle is complete, part k has the values that rank k had in its own part k."""
        if not self._has_parts(whole):
            return DONE
        return self._begin("all_gather", self._all_gather, whole.view(-1), self._own(whole))

    def reduce_scatter_in_place(self, whole: Tensor) -> Handle:
        """Begin to sum `whole`, [size n, ...], over the ranks. When the handle is complete, this
        rank's part [n, ...] of `whole` has the sum of this part; all other parts are undefined."""
        if not self._has_parts(whole):
            return DONE
        return self._begin("reduce_scatter", self._reduce_scatter, self._own(whole), whole.view(-1))

    def _has_parts(self, whole: Tensor) -> bool:
        _require(whole)
        if whole.shape[0] % self.size:
            raise ValueError(f"{self.size} ranks cannot share dim 0 of {tuple(whole.shape)}")
        return self.size > 1 and whole.numel() > 0

    def _own(self, whole: Tensor) -> Tensor:
        """Return this rank's part of `whole`, which has one part for each rank, as a flat view."""
        return whole.view(self.size, -1)[self.rank]

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Replace `tensor` by the tensor of rank `root`, and return it."""
        _require(tensor)
        if self.size > 1:
            self._begin("broadcast", self._broadcast, tensor.view(-1), root).wait()
        return tensor

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send a tensor to rank `peer`, and return when the tensor may be changed again."""
        self.isend(tensor, peer).wait()

    def recv(self, tensor: Tensor, peer: int) -> Tensor:
        """Fill `tensor` with the tensor that rank `peer` sends, and return it."""
        self.irecv(tensor, peer).wait()
        return tensor

    def isend(self, tensor: Tensor, peer: int) -> Handle:
        """Begin to send a tensor to rank `peer`. The tensor must not change until `wait`
        returns."""
        self.tally.add("send", _require(tensor).nbytes)
        return self._isend(tensor.view(-1), peer)

    def irecv(self, tensor: Tensor, peer: int) -> Handle:
        """Begin to fill `tensor` with the tensor that rank `peer` sends."""
        _require(tensor)
        return self._irecv(tensor.view(-1), peer)

    def neighbours(
        self, sources: Sequence[int], destinations: Sequence[int], lasting: bool = True
    ) -> "Neighbourhood":
        """Return the graph in which this rank receives from `sources` and sends to `destinations`.
        All ranks call this method. If `lasting` is True, the graph is for many exchanges, so the
        call may take longer and synchronize all ranks."""
        return Neighbourhood(self, sources, destinations)

    # -- control ---------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Return when every rank of the group has called this method."""
        if self.size > 1:
            self.timed("barrier", self.control.Barrier)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. A value is any object that can be
        pickled."""
        if self.size == 1:
            return [value]
        return self.timed("all_gather_object", self.control.allgather, value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the object of rank `root` on every rank. The object must be picklable."""
        if self.size == 1:
            return value
        return self.timed("broadcast_object", self.control.bcast, value, root)

    def all_gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all ranks, in rank order. Every rank gives equally many numbers;
        they are sent as 64-bit floating-point numbers in one small MPI message, without
        pickling."""
        numbers = np.array(values, dtype=np.float64)
        if self.size == 1:
            return [numbers.tolist()]
        every = np.empty((self.size, len(numbers)))
        self.timed("all_gather_numbers", self.control.Allgather, numbers, every)
        return every.tolist()

    def broadcast_numbers(self, values: Sequence[float], root: int = 0) -> list[float]:
        """Return the numbers of rank `root` on every rank. Every rank gives equally many numbers;
        they are sent as in `all_gather_numbers`."""
        numbers = np.array(values, dtype=np.float64)
        if self.size > 1:
            self.timed("broadcast_numbers", self.control.Bcast, numbers, root)
        return numbers.tolist()

    def greatest(self, values: Sequence[int]) -> list[int]:
        """Return the maximum over all ranks for each number of `values` (64-bit integers). The
        values are sent in one small MPI message, without pickling."""
        if self.size == 1:
            return list(values)
        from mpi4py import MPI

        numbers = np.array(values, dtype=np.int64)
        self.timed("vote", self.control.Allreduce, MPI.IN_PLACE, numbers, MPI.MAX)
        return numbers.tolist()

    def timed(self, name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Call `work(*arguments)`, time it (see `count`), and return its result. During the call,
        and after a failure of the call, `busy` is the collective's `name`, for reports."""
        self.busy = name
        waits = self._waits
        begin = self.clock.mark() if waits is not None else None
        result = work(*arguments)
        if waits is not None and begin is not None:
            waits.add(begin, self.clock.mark())
        self.busy = ""
        return result

    def _begin(
        self,
        name: str,
        work: Callable[..., Handle],
        *arguments: Any,
        counted_bytes: int | None = None,
    ) -> Handle:
        """Begin the collective `name` on flat tensors, and count its bytes. Return the handle.

        The tally counts `counted_bytes`; None means the size of the largest tensor: the full result
        of an all-gather, or the full input of a reduce-scatter.
        """
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if counted_bytes is None:
            counted_bytes = max(tensor.nbytes for tensor in tensors)
        self.tally.add(name, counted_bytes)
        handle = self.timed(name, work, *arguments)
        return handle if handle is DONE else _UnderWay(self, name, handle, tensors)

    # -- methods that a transport implements, on flat tensors and for size > 1 ---------------------
    # In all_gather and reduce_scatter, the smaller tensor may be a view of the larger one.

    @abstractmethod
    def _all_reduce(self, flat: Tensor, op: str) -> Handle: ...

    @abstractmethod
    def _all_gather(self, result: Tensor, flat: Tensor) -> Handle: ...

    @abstractmethod
    def _reduce_scatter(self, result: Tensor, flat: Tensor) -> Handle: ...

    @abstractmethod
    def _all_to_all(self, result: Tensor, flat: Tensor, parts: Exchanged) -> Handle: ...

    @abstractmethod
    def _broadcast(self, flat: Tensor, root: int) -> Handle: ...

    @abstractmethod
    def _isend(self, flat: Tensor, peer: int) -> Handle: ...

    @abstractmethod
    def _irecv(self, flat: Tensor, peer: int) -> Handle: ...


class _UnderWay:
    """A collective that has begun. The time that `wait` takes is added to the time of the
    collective."""

    def __init__(
        self, group: Communicator, name: str, handle: Handle, tensors: Sequence[Tensor]
    ) -> None:
        self._group = group
        self.name = name
        self._handle = handle
        self._tensors = tensors
        group.under_way.add(self)

    def wait(self) -> None:
        """Wait for the collective; its tensors may be used afterwards."""
        self._group.timed(self.name, self._handle.wait)
        self._group.under_way.discard(self)

    def done(self) -> bool:
        """Return True if the collective is complete, so that its tensors may be used."""
        done = self._handle.done()
        if done:
            self._group.under_way.discard(self)
        return done


class _All:
    """One handle for several messages."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        """Wait for every message."""
        for handle in self._handles:
            handle.wait()

    def done(self) -> bool:
        """Return True if every message is complete."""
        # call `done` of every handle, because some transports make progress only in this call
        over = [handle.done() for handle in self._handles]
        return all(over)


class Neighbourhood:
    """The neighbours of this rank in a graph: the ranks that send to this rank, or receive from it.

    This class uses sends and receives, which every transport has. A transport with collectives for
    graphs has a subclass. In tallies and in `busy`, an exchange has the name "neighbours".
    """

    def __init__(
        self, group: Communicator, sources: Sequence[int], destinations: Sequence[int]
    ) -> None:
        """Store the neighbours. Raises ValueError for ranks that are not in the group, occur twice,
        or are this rank."""
        for peers in (sources, destinations):
            there = set(peers) - {group.rank}
            if len(there) < len(peers) or not there <= set(range(group.size)):
                raise ValueError(
                    f"{list(peers)} cannot be neighbours of rank {group.rank} of {group.size}"
                )
        self.group = group
        self.sources = tuple(sources)
        self.destinations = tuple(destinations)

    def gather(self, tensor: Tensor) -> Tensor:
        """Send `tensor` [...] to all destinations. Return the tensors that the sources send, in the
        order of the sources: [sources, ...]."""
        result, handle = self.gather_begin(tensor)
        handle.wait()
        return result

    def gather_begin(self, tensor: Tensor) -> tuple[Tensor, Handle]:
        """Begin `gather`. The result is complete when `wait` of the handle has returned; the tensor
        must not change until then. All ranks of the group begin the same exchanges in the same
        order."""
        _require(tensor)
        result = tensor.new_empty((len(self.sources), *tensor.shape))
        if not tensor.numel() or not (self.sources or self.destinations):
            return result, DONE
        group = self.group
        name = "neighbours"
        group.tally.add(name, tensor.nbytes, len(self.destinations))
        handle = group.timed(name, self._gather, result.view(-1), tensor.view(-1))
        return result, _UnderWay(group, name, handle, [tensor, result])

    def _gather(self, result: Tensor, flat: Tensor) -> Handle:
        parts = dict(zip(self.sources, result.view(len(self.sources), -1), strict=True))
        return _All(
            [
                self.group._isend(flat, peer) if sends else self.group._irecv(parts[peer], peer)
                for sends, peer in pair_order(
                    self.group.rank, self.group.size, self.sources, self.destinations
                )
            ]
        )


class OneRank(Communicator):
    """A group of one rank in a program without MPI: nothing is ever sent."""

    exact = posts_early = True

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.tally = Tally(1)
        self.clock = HOST
        self.group = ""
        self.busy = ""
        self._waits = None
        self.under_way = set()
        self.made = []

    def _never(self, *arguments: Any, **named: Any) -> NoReturn:
        raise AssertionError("a group of one rank sends no messages")

    _all_reduce = _all_gather = _reduce_scatter = _all_to_all = _broadcast = _never
    _isend = _irecv = _never


def _require(tensor: Tensor) -> Tensor:
    # transports ignore strides: NCCL would send wrong elements of a non-contiguous tensor
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor to be sent, of shape {tuple(tensor.shape)}, must be contiguous")
    return tensor
