"""The communicator contract: what a wire must offer to the parallel layers, and nothing else.

A communicator stands for one axis of the process grid, seen from one rank. Size 1 is the same code
with the exchange skipped. Tensors must be contiguous: a silently copied one would lose its result.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:  # the import initialises MPI, which work on one rank does without
    from mpi4py import MPI


class Handle(Protocol):
    """A send or receive under way; the tensor belongs to it until `wait` returns."""

    def wait(self) -> None: ...

    def done(self) -> bool: ...


class Communicator(ABC):
    """One axis of the process grid: `rank` of `size`.

    Sums are taken in ascending rank order, in float32 at least, so that they do not depend on how
    a tensor is cut into messages. MPI carries the control messages on every wire.

    `busy` names the collective that this rank is in, and is empty outside; another thread may read
    it. `waited_s` adds up the seconds in collectives: mostly waiting, where one rank is slow.
    """

    def __init__(self, control: "MPI.Comm") -> None:
        self.control = control
        self.rank: int = control.Get_rank()
        self.size: int = control.Get_size()
        self.busy = ""
        self.waited_s = 0.0

    # -- tensors ---------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Replace `tensor` (any shape) by its sum or "max" over the axis; returns it."""
        _require(tensor)
        if self.size > 1 and tensor.numel():
            self._timed("all_reduce", self._all_reduce, tensor.view(-1), op)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[n, ...] on each rank -> [size n, ...], rank after rank."""
        _require(tensor)
        if self.size == 1:
            return tensor
        result = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        self._timed("all_gather", self._all_gather, result.view(-1), tensor.view(-1))
        return result

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """[size n, ...] on each rank -> [n, ...]: this rank's part of the sum over the axis."""
        _require(tensor)
        if self.size == 1:
            return tensor
        if tensor.shape[0] % self.size:
            raise ValueError(f"{self.size} ranks cannot share dim 0 of {tuple(tensor.shape)}")
        result = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        self._timed("reduce_scatter", self._reduce_scatter, result.view(-1), tensor.view(-1))
        return result

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Replace `tensor` by the root's; returns it."""
        _require(tensor)
        if self.size > 1:
            self._timed("broadcast", self._broadcast, tensor.view(-1), root)
        return tensor

    def send(self, tensor: Tensor, peer: int) -> None:
        self.isend(tensor, peer).wait()

    def recv(self, tensor: Tensor, peer: int) -> Tensor:
        self.irecv(tensor, peer).wait()
        return tensor

    def isend(self, tensor: Tensor, peer: int) -> Handle:
        _require(tensor)
        return self._isend(tensor.view(-1), peer)

    def irecv(self, tensor: Tensor, peer: int) -> Handle:
        _require(tensor)
        return self._irecv(tensor.view(-1), peer)

    # -- control ---------------------------------------------------------------------------------

    def barrier(self) -> None:
        if self.size > 1:
            self._timed("barrier", self.control.Barrier)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Any picklable value of each rank, in rank order."""
        if self.size == 1:
            return [value]
        return self._timed("all_gather_object", self.control.allgather, value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        if self.size == 1:
            return value
        return self._timed("broadcast_object", self.control.bcast, value, root)

    def greatest(self, values: Sequence[int]) -> list[int]:
        """The greatest of each of `values` (64 bits) over the axis: one small message, no pickling.

        MPI takes this maximum itself: of integers it is exact in any order.
        """
        if self.size == 1:
            return list(values)
        from mpi4py import MPI

        numbers = np.array(values, dtype=np.int64)
        self._timed("vote", self.control.Allreduce, MPI.IN_PLACE, numbers, MPI.MAX)
        return numbers.tolist()

    def _timed(self, name: str, work: Callable, *arguments: Any) -> Any:
        """`work(*arguments)`; if it fails, `busy` goes on telling where."""
        self.busy = name
        start = time.perf_counter()
        result = work(*arguments)
        self.waited_s += time.perf_counter() - start
        self.busy = ""
        return result

    # -- what a wire implements, on flat tensors and for size > 1 ----------------------------------

    @abstractmethod
    def _all_reduce(self, flat: Tensor, op: str) -> None: ...

    @abstractmethod
    def _all_gather(self, result: Tensor, flat: Tensor) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, result: Tensor, flat: Tensor) -> None: ...

    @abstractmethod
    def _broadcast(self, flat: Tensor, root: int) -> None: ...

    @abstractmethod
    def _isend(self, flat: Tensor, peer: int) -> Handle: ...

    @abstractmethod
    def _irecv(self, flat: Tensor, peer: int) -> Handle: ...


class OneRank(Communicator):
    """An axis of size 1 outside of any MPI program: nothing is ever exchanged."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.busy, self.waited_s = "", 0.0

    def _never(self, *arguments: Any) -> NoReturn:
        raise AssertionError("one rank has nobody to exchange with")

    _all_reduce = _all_gather = _reduce_scatter = _broadcast = _isend = _irecv = _never


def _require(tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} on a wire must be contiguous")


def combine(pieces: Sequence[Tensor] | Tensor, op: str, result: Tensor) -> None:
    """`result` [n] = sum or max of at least two `pieces` [n], in ascending order.

    Half types are summed in float32 and rounded once. `result` may be the first piece.
    """
    if op == "max":
        torch.maximum(pieces[0], pieces[1], out=result)
        for piece in pieces[2:]:
            torch.maximum(result, piece, out=result)
    elif op != "sum":
        raise ValueError(f"op is sum or max, not {op}")
    elif result.dtype in (torch.bfloat16, torch.float16):
        total = pieces[0].float()
        for piece in pieces[1:]:
            total += piece
        result.copy_(total)
    else:
        torch.add(pieces[0], pieces[1], out=result)
        for piece in pieces[2:]:
            result += piece
