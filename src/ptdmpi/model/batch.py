"""A microbatch as tensors: its way to the device, in one piece, beside what computes; and the two
ends of the graph that a stage makes of it."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ptdmpi.comm.queues import Passed, copies_of
from ptdmpi.model.documents import Documents

ALIGNMENT_BYTES = 256  # of each tensor of a step in their common memory


@dataclass(frozen=True)
class Batch:
    """One microbatch: inputs and labels [s, b] of ids, weights [s, b] or None (all
    1), and the global sample numbers [b].

    `documents` where a sequence holds more than one. Of a masked language model, labels and weights
    [k, b] belong to the `masked` positions [k, b]; `types` [s, b] tell segments apart, and `order`
    [b] is 0 where they stand in their order, 1 where swapped, -1 where there is one only.

    `tokens` and `orders` are how many of them count (tokens by their weights); made on the host,
    where a batch begins, for a device would have to be waited for.
    """

    inputs: Tensor
    labels: Tensor
    weights: Tensor | None
    samples: Tensor
    documents: Documents | None = None
    masked: Tensor | None = None
    types: Tensor | None = None
    order: Tensor | None = None
    tokens: float = field(init=False)
    orders: int = field(init=False)

    def __post_init__(self) -> None:
        # in float64: float32 counts to 2^24 only, and large batches have more tokens
        weights = self.weights
        tokens = self.labels.numel() if weights is None else weights.double().sum()
        orders = 0 if self.order is None else (self.order >= 0).sum()
        object.__setattr__(self, "tokens", float(tokens))
        object.__setattr__(self, "orders", int(orders))

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The same microbatch with another tensor for each of its tensors; counts stay."""
        changed = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                object.__setattr__(changed, name, change(value))
        if self.documents is not None:
            object.__setattr__(changed, "documents", self.documents.each(change))
        return changed


@dataclass
class _Slot:
    """Memory for the microbatches of one step, on both sides; `free`: what used it last is done."""

    host: Tensor
    there: Tensor
    free: Passed
    copied: Passed


class Placing:
    """Brings microbatches to a device, all of a step by one copy, in a ring of two: while the
    device computes with one half, the host fills the other, and neither waits. What was placed may
    be used by what is computed until the next call. On the host they are there already."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._copies = device, copies_of(device)
        self._ring: list[_Slot] = []

    def place(self, batches: Sequence[Batch]) -> list[Batch]:
        """The microbatches on the device; what computes from now on may use them."""
        if self.device.type == "cpu":
            return list(batches)
        if self._ring:  # all that was computed so far, with what was placed last
            self._ring[-1].free = self._copies.computed()
        tensors: list[Tensor] = []

        def noted(one: Tensor) -> Tensor:
            tensors.append(one)
            return one

        for batch in batches:
            batch.each(noted)
        ends, end = [], 0
        for one in tensors:
            end += one.nbytes
            ends.append(end)
            end = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        slot = self._next(end)
        for one, stop in zip(tensors, ends, strict=True):
            _room(slot.host, one, stop).copy_(one)
        with self._copies.behind(slot.free):
            slot.there[:end].copy_(slot.host[:end], non_blocking=True)
        slot.copied = self._copies.passed()
        slot.copied.computing_waits()
        stops = iter(ends)
        return [batch.each(lambda one: _room(slot.there, one, next(stops))) for batch in batches]

    def _next(self, size: int) -> _Slot:
        """The slot whose turn it is, with room for `size` bytes."""
        slot = self._ring.pop(0) if len(self._ring) == 2 else None
        if slot is not None:
            slot.copied.host_waits()  # two steps ago: it is done
        if slot is None or len(slot.host) < size:
            now = self._copies.computed()
            # new memory may have been another tensor's, with which the device still computes
            there = torch.empty(size, dtype=torch.uint8, device=self.device)
            slot = _Slot(self._copies.locked(size), there, now, now)
        self._ring.append(slot)
        return slot


def _room(memory: Tensor, like: Tensor, stop: int) -> Tensor:
    """The bytes of `memory` up to `stop` as a tensor like another."""
    return memory[stop - like.nbytes : stop].view(like.dtype).view(like.shape)


class Arrival:
    """A stage's input as its graph has it: nothing of the input, and in the end its gradient."""

    gradient: Tensor | None = None

    def begin(self, x: Tensor) -> Tensor:
        """The input as a value of the stage's own graph. As a leaf it would stay until its gradient
        is there, and so in vain where a first layer keeps but a share of it."""
        arrived: Tensor = _Arrive.apply(x.new_empty(0, requires_grad=True), x, self)
        return arrived


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor, arrival: Arrival) -> Tensor:
        ctx.arrival = arrival
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[None, None, None]:
        ctx.arrival.gradient = dx
        return None, None, None


class Departure:
    """A stage's output as its graph has it: nothing of the output, which can go once it has been
    passed on."""

    gradient: Tensor | None = None

    def __init__(self, y: Tensor) -> None:
        self._end: GradientEdge | None = get_gradient_edge(_Depart.apply(y, self))

    def backward(self, dy: Tensor | None) -> None:
        """Run the graph back from the output's gradient. As an argument of torch's own call it
        would have SymPy imported, to compare two shapes: a second of every rank's start."""
        assert self._end is not None, "a graph runs back once"
        # the graph knows this object: knowing it in turn would keep both until someone collects
        end, self._end, self.gradient = self._end, None, dy
        torch.autograd.backward(end)


class _Depart(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, departure: Departure) -> Tensor:
        ctx.departure = departure
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor | None, None]:
        dy, ctx.departure.gradient = ctx.departure.gradient, None
        return dy, None
