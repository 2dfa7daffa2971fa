"""The context axis. The ranks of the context axis have different positions of the same samples, and
attention on each rank sees the keys of all ranks.

This module implements the method "all_gather", which gathers keys and values (Dubey et al. 2024,
arXiv 2407.21783, section 3.3.2). Some transports (libraries that send messages) make progress
during computation. With such a transport, keys and values are gathered while the queries are
computed, and the gradients of keys and values are summed while the backward of the queries is
computed. `heads.py` implements the method "ulysses", and `ring.py` the method "ring".
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ptdmpi.comm.communicator import DONE, Communicator, Handle, OneRank
from ptdmpi.config.choices import ContextMethod
from ptdmpi.model.sequence.positions import Positions


@dataclass(frozen=True)
class ContextAxis:
    """The communicator of the context axis, and the method by which attention sees all positions.
    Each rank of the axis has two chunks of every sequence, in zigzag order (see `Positions`)."""

    comm: Communicator = field(default_factory=OneRank)
    method: ContextMethod = "all_gather"

    @property
    def size(self) -> int:
        """Return the number of ranks of the context axis."""
        return self.comm.size

    @property
    def positions(self) -> Positions:
        """Return the positions of every sequence that this rank of the context axis has."""
        return Positions(self.comm.rank, self.comm.size)

    @property
    def exchange(self) -> str:
        """Return the method by which attention gets the keys and values of other context ranks;
        "none" if each rank has all positions (see `Layout.exchange`)."""
        return self.method if self.size > 1 else "none"

    @property
    def gathers_early(self) -> bool:
        """Return True if keys and values are gathered while the rank computes its queries."""
        return self.exchange == "all_gather" and self.comm.overlaps

    def whole_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values from the c ranks. Each rank has [b, heads, s / c, head size]; the
        results have all positions, [b, heads, s, head size]. Values may have another head size than
        keys. In the backward, the gradients are summed over the c ranks."""
        keys, values = _WholeKeys.apply(k, v, self)
        return keys, values

    def whole_keys_begin(self, k: Tensor, v: Tensor) -> "ArrivingKeys":
        """Begin to gather keys and values, as `whole_keys` does. The method `wait` of the returned
        object returns the keys and values at all positions."""
        under_way = _UnderWay(self, (k.shape, v.shape))
        return ArrivingKeys(_BeginKeys.apply(k, v, under_way), under_way)

    def in_order(self, dealt: Tensor) -> Tensor:
        """Reorder the tensor `dealt` [s, ...] from the order of ranks to the order of positions,
        and return the result. `dealt` has first the two chunks of rank 0, then the two chunks of
        rank 1, and so on."""
        chunks = dealt.unflatten(0, (self.size, 2, -1))
        # rank r has the chunks r and 2c - 1 - r: from rank to rank, the first chunks have ascending
        # positions, and the second chunks have descending positions
        return torch.cat((chunks[:, 0], chunks[:, 1].flip(0))).flatten(0, 1)

    def dealt(self, whole: Tensor) -> Tensor:
        """Reorder the tensor `whole` [s, ...] from the order of positions to the order of the ranks
        that have its chunks, and return the result. This method is the inverse of `in_order`."""
        chunks = whole.unflatten(0, (2 * self.size, -1))
        return torch.stack((chunks[: self.size], chunks[self.size :].flip(0)), 1).flatten(0, 2)


class _WholeKeys(Function):
    """The gather of keys and values in one message. In the backward, the gradients of keys and
    values are summed in one message."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, axis: ContextAxis) -> tuple[Tensor, Tensor]:
        ctx.axis, ctx.shapes = axis, (k.shape, v.shape)
        whole = axis.in_order(axis.comm.all_gather(_together(k, v)))
        keys, values = _apart(whole, *ctx.shapes)
        return keys, values

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, None]:
        axis: ContextAxis = ctx.axis
        both = axis.dealt(_together(dk, dv))
        dk, dv = _apart(axis.comm.reduce_scatter(both.contiguous()), *ctx.shapes)
        return dk, dv, None


def _together(k: Tensor, v: Tensor) -> Tensor:
    """Return keys [b, heads, n, d] and values [b, heads, n, v] as one tensor [n, b heads (d + v)],
    in which the keys of all heads come before the values."""
    return torch.cat([x.permute(2, 0, 1, 3).flatten(1) for x in (k, v)], 1)


def _apart(both: Tensor, keys: torch.Size, values: torch.Size) -> tuple[Tensor, Tensor]:
    """Return keys and values as views of `both`, a tensor in the form that `_together` returns.
    They have the shapes `keys` and `values`, except for the number of positions."""
    first = keys[0] * keys[1] * keys[3]
    parts = zip((both[:, :first], both[:, first:]), (keys, values), strict=True)
    k, v = (
        part.unflatten(1, (b, heads, d)).permute(1, 2, 0, 3) for part, (b, heads, _, d) in parts
    )
    return k, v


class _UnderWay:
    """A message that has begun and is not complete, and the tensor that receives its result. The
    message has keys and values (forward) or their gradients (backward). `shapes` are the shapes of
    this rank's keys and values."""

    def __init__(self, axis: ContextAxis, shapes: tuple[torch.Size, torch.Size]) -> None:
        self.axis = axis
        self.shapes = shapes
        self._result: Tensor | None = None
        self._message: Handle = DONE

    def begin(self, result: Tensor, message: Handle) -> Tensor:
        """Store a message that has begun. Return the tensor that receives the result of the
        message. This tensor is complete only after `end`."""
        self._result, self._message = result, message
        return result

    def end(self) -> Tensor:
        """Wait until the message that `begin` has stored is complete. Return the tensor with its
        result."""
        result, message = self._result, self._message
        assert result is not None, "no message has begun"
        message.wait()
        # remove the handle, because it refers to the tensors of the message, which would otherwise
        # stay in memory until the backward
        self._result, self._message = None, DONE
        return result


class ArrivingKeys(NamedTuple):
    """Keys and values that are being gathered. `own` has the keys and values of this rank.

    Autograd computes gradients in reverse order. The sum of the gradients of keys and values
    therefore begins in the backward of `wait`, and is complete in the backward of
    `whole_keys_begin`. Between these two backwards, autograd computes the backward of everything
    that the forward has computed between `whole_keys_begin` and `wait`, and the sum of the
    gradients overlaps with this computation.
    """

    own: Tensor
    under_way: _UnderWay

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values at all positions, [b, heads, s, d] each."""
        keys, values = _EndKeys.apply(self.own, self.under_way)
        return keys, values


class _BeginKeys(Function):
    """The beginning of the gather of keys and values, and the end of the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, under_way: _UnderWay) -> Tensor:
        ctx.under_way = under_way
        own = _together(k, v)
        under_way.begin(*under_way.axis.comm.all_gather_begin(own))
        return own

    @staticmethod
    def backward(ctx: Any, summed: Tensor) -> tuple[Tensor, Tensor, None]:
        dk, dv = _apart(ctx.under_way.end(), *ctx.under_way.shapes)
        return dk, dv, None


class _EndKeys(Function):
    """The end of the gather of keys and values, and the beginning of the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, under_way: _UnderWay) -> tuple[Tensor, Tensor]:
        ctx.under_way = under_way
        keys, values = _apart(under_way.axis.in_order(under_way.end()), *under_way.shapes)
        return keys, values

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, None]:
        under_way: _UnderWay = ctx.under_way
        both = under_way.axis.dealt(_together(dk, dv))
        return under_way.begin(*under_way.axis.comm.reduce_scatter_begin(both.contiguous())), None
