"""Attention in which each context rank computes some of the heads. Before attention, the ranks of
the context axis exchange activations. After the exchange, each rank has some of the heads, at all
positions (Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509, section 3.1).

Each head is computed completely on one rank, so the result is bitwise equal to the result without
context parallelism.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.plan.layer.attention.shape import key_copies


def part_of_heads(
    q: Tensor, k: Tensor, v: Tensor, axis: ContextAxis
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange queries, keys and values between the c ranks of the context axis. The inputs have
    all heads at this rank's positions, [b, heads, s / c, head size]; the results have this rank's
    part of the heads at all positions, [b, heads / c, s, head size]. Values may have another head
    size than queries and keys.

    If c does not divide the number of key heads, each key head is repeated `key_copies` times. The
    gradients of the copies are summed in float32 or wider.
    """
    queries, keys, values = _PartOfHeads.apply(q, k, v, axis)
    return queries, keys, values


def all_heads(y: Tensor, axis: ContextAxis, *, kept: bool = False) -> Tensor:
    """Exchange the outputs of heads between the c ranks of the context axis. The input has this
    rank's part of the heads at all positions, [s, b, heads / c * head size]; the result has all
    heads at this rank's positions, [s / c, b, heads * head size].

    `kept` is True if the kernel of attention keeps `y` for its backward. The next linear keeps the
    result of this function, so the outputs would be stored twice. If `kept` is True, the memory of
    `y` is therefore freed after the forward, and in the backward the ranks exchange the outputs
    again to restore `y`.
    """
    joined: Tensor = _AllHeads.apply(y, axis, kept)
    return joined


class _PartOfHeads(Function):
    """The exchange of queries, keys and values in one message. In the backward, the gradients of
    queries, keys and values are exchanged in one message."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: ContextAxis
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.axis = axis
        ctx.copies = key_copies(k.shape[1], axis.size)
        keys, values = (x.repeat_interleave(ctx.copies, 1) for x in (k, v))
        # the first dim is the rank: [c, s / c, b, heads / c, d]
        each = [x.unflatten(1, (axis.size, -1)).permute(1, 3, 0, 2, 4) for x in (q, keys, values)]
        ctx.heads, sizes = zip(*(x.shape[3:] for x in each), strict=True)
        width = sum(x.shape[3] * x.shape[4] for x in each)
        sent = q.new_empty(*each[0].shape[:3], width)
        for part, x in zip(_parts(sent, ctx.heads, sizes), each, strict=True):
            part.copy_(x)
        parts = _parts(axis.comm.all_to_all(sent.flatten(0, 1)), ctx.heads, sizes)
        q, k, v = (axis.in_order(part).permute(1, 2, 0, 3) for part in parts)
        return q, k, v

    @staticmethod
    def backward(
        ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        axis: ContextAxis = ctx.axis
        # do not assign the separate tensors to names, so that they are freed before the message
        dealt = torch.cat([axis.dealt(x.permute(2, 0, 1, 3)).flatten(2) for x in (dq, dk, dv)], 2)
        arrived = axis.comm.all_to_all(dealt).unflatten(0, (axis.size, -1))
        del dealt
        parts = _parts(arrived, ctx.heads, [x.shape[3] for x in (dq, dk, dv)])
        # [c, s / c, b, heads / c, d] -> [b, heads, s / c, d]
        dq, dk, dv = (part.permute(2, 0, 3, 1, 4).flatten(1, 2) for part in parts)
        return dq, _summed(dk, ctx.copies), _summed(dv, ctx.copies), None


def _parts(joined: Tensor, heads: Sequence[int], sizes: Sequence[int]) -> Iterator[Tensor]:
    """Divide the last dim of a tensor into queries, keys and values (or their gradients), and yield
    each of them as [..., heads, size]. `heads` and `sizes` have the numbers of heads and the head
    sizes of these three tensors."""
    widths = [count * size for count, size in zip(heads, sizes, strict=True)]
    for part, count in zip(joined.split(widths, dim=-1), heads, strict=True):
        yield part.unflatten(-1, (count, -1))


def _summed(gradient: Tensor, copies: int) -> Tensor:
    """Return the sum over the copies of each head: [b, heads * copies, n, head size] -> [b, heads,
    n, head size]."""
    if copies == 1:
        return gradient
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.unflatten(1, (-1, copies)).sum(2, dtype=wide).to(gradient.dtype)


class _AllHeads(Function):
    """The exchange of the heads' outputs. In the backward, the gradients of the outputs are
    exchanged; see `all_heads`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, axis: ContextAxis, kept: bool) -> Tensor:
        arrived = axis.comm.all_to_all(axis.dealt(y).contiguous()).unflatten(0, (axis.size, -1))
        joined = arrived.permute(1, 2, 0, 3).flatten(2)  # [c, s / c, b, w] -> [s / c, b, c w]
        ctx.axis = axis
        ctx.sends_back = kept and ctx.needs_input_grad[0]
        if ctx.sends_back:
            ctx.save_for_backward(y, joined)
            storage = y.untyped_storage()
            if storage.nbytes() == y.nbytes:  # this memory contains only `y`, so it can be freed
                storage.resize_(0)
        return joined

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        axis: ContextAxis = ctx.axis
        if ctx.sends_back:
            y, joined = ctx.saved_tensors
            storage = y.untyped_storage()
            storage.resize_(max(storage.nbytes(), y.nbytes))
            # write through `.data`, so that autograd does not report a changed tensor; the values
            # are the same as before
            y.data.copy_(_by_heads(joined, axis))
        return _by_heads(dy, axis), None, None


def _by_heads(x: Tensor, axis: ContextAxis) -> Tensor:
    """Exchange heads between the c ranks of the context axis. `x` [s / c, b, heads d] has all heads
    at this rank's positions; the result [s, b, heads d / c] has this rank's part of the heads at
    all positions."""
    by_rank = x.unflatten(2, (axis.size, -1)).permute(2, 0, 1, 3).flatten(0, 1)
    return axis.in_order(axis.comm.all_to_all(by_rank.contiguous()))
