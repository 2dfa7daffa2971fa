"""Layers divided over the tensor axis (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

Activations are [s, b, h]: sequence first, so that the sequence-parallel collectives work on
contiguous memory. The conjugate operators of the paper's Figure 3:

    f   forward: nothing             backward: all-reduce
    g   forward: all-reduce          backward: nothing

and with sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2), where
activations between the blocks are divided along s:

    g   forward: all-gather          backward: reduce-scatter      (replaces f)
    g'  forward: reduce-scatter      backward: all-gather          (replaces g)

Weight gradients are added to the parameter's float32 `main_grad` where they are computed, or in the
second part of a split backward (`Parameter.accumulate`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ptdmpi.comm.communicator import DONE, Communicator, Handle
from ptdmpi.model.adapters.low_rank import LowRankAdapter
from ptdmpi.model.adapters.scales import ScaleAdapter, rescaled
from ptdmpi.model.kernels import Computing, Kernels
from ptdmpi.model.kernels.norm import soft_cap
from ptdmpi.model.parameters import Parameter, Split, declare
from ptdmpi.model.random import RandomStream
from ptdmpi.model.sequence.positions import ALL, Positions


@dataclass(frozen=True)
class TensorAxis:
    """The tensor communicator, and whether activations between blocks are divided along s."""

    comm: Communicator
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        return self.comm.size

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def divides_sequence(self) -> bool:
        return self.sequence_parallel and self.size > 1

    def gather(self, x: Tensor) -> Tensor:
        """Return the input of a block: whole sequences on every rank."""
        whole, arrived = self.gather_begin(x)
        arrived.wait()
        return whole

    def gather_begin(self, x: Tensor) -> tuple[Tensor, Handle]:
        """Begin `gather`; the sequences are complete once the handle has been waited for."""
        return self.comm.all_gather_begin(x.contiguous()) if self.divides_sequence else (x, DONE)

    def reduce(self, partial: Tensor) -> Tensor:
        """Return the output of a block: the sum of the ranks' parts, or this rank's positions of
        it."""
        total, summed = self.reduce_begin(partial)
        summed.wait()
        return total

    def reduce_begin(self, partial: Tensor) -> tuple[Tensor, Handle]:
        """Begin `reduce`; the sum is complete once the handle has been waited for."""
        partial = partial.contiguous()
        if self.divides_sequence:
            return self.comm.reduce_scatter_begin(partial)
        return partial, self.comm.all_reduce_begin(partial)

    def share(self, x: Tensor) -> Tensor:
        """Return this rank's 1/t of `x`, flat: a view of it. All ranks hold `x`, and t divides
        it."""
        flat = x.detach().contiguous().view(-1)
        elements = len(flat) // self.size
        return flat.narrow(0, self.rank * elements, elements)

    def from_shares(self, share: Tensor) -> Tensor:
        """Return `x`, flat, from the `share` that each rank has of it."""
        return self.comm.all_gather(share)

    def between_blocks(self, positions: Positions = ALL) -> Positions:
        """Return those of a tensor group's positions whose activations this rank holds between
        blocks."""
        return positions.shared(self.rank, self.size) if self.divides_sequence else positions


def accumulate_bias_gradient(bias: Parameter | None, dy: Tensor) -> None:
    """Add the gradient of a bias to its `main_grad`; do nothing if there is no bias or it does not
    train."""
    if bias is not None and bias.requires_grad:
        # in the gradient's type: a sum over all positions in a half type loses small addends
        summed = dy.flatten(0, -2).sum(0, dtype=bias.main_grad.dtype)
        bias.accumulate(lambda total: total.add_(summed))


class Gathered:
    """An activation at all positions, for each gradient that needs it. It is gathered from the
    ranks' positions: from now on if `early`, else on the first call, which a split backward makes
    later."""

    def __init__(self, axis: TensorAxis, x: Tensor, early: bool = False) -> None:
        self._axis, self._x = axis, x
        self._begun = axis.gather_begin(x) if early else None
        self._whole: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._whole is None:
            whole, arrived = self._begun or self._axis.gather_begin(self._x)
            arrived.wait()
            self._whole, self._begun = whole, None
        return self._whole


@dataclass(frozen=True)
class AdaptersBeside:
    """The adapters that are added to a linear's product in one forward pass, and the random stream
    of their dropout."""

    adapters: Sequence[LowRankAdapter] = ()
    stream: RandomStream | None = None

    @property
    def trained(self) -> Sequence[Parameter]:
        """Return the adapters' weights, for autograd to see."""
        return [weight for one in self.adapters for weight in (one.a, one.b)]


NOTHING = AdaptersBeside()


class _ColumnLinear(Function):
    """The operator f, then x W^T + b plus the adapters' products. It saves only this rank's
    positions, if a gradient needs them, and gathers them again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        bias: Parameter | None,
        axis: TensorAxis,
        kernels: Kernels,
        beside: AdaptersBeside = NOTHING,
        *trained: Parameter,
    ) -> Tensor:
        whole = axis.gather(x)
        y = kernels.linear(whole, weight, bias)
        downs = [one.add_to(y, whole, beside.stream) for one in beside.adapters]
        ctx.save_for_backward(x if weight.requires_grad or downs else None, *downs)
        ctx.layer = (weight, bias, axis, kernels, beside)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, axis, kernels, beside = ctx.layer
        x, *downs = ctx.saved_tensors
        whole = None
        if x is not None:
            # gathered once more instead of kept whole (Korthikanti et al. 2022, section 4.2.2). It
            # overlaps the computation of the input's gradient if communication can progress
            # meanwhile; else it would only take memory for longer. x itself would keep its graph
            whole = Gathered(axis, x.detach(), axis.comm.overlaps and not weight.puts_off)
        ups = [one.up(dy) for one in beside.adapters]
        dx, summed = None, DONE
        if ctx.needs_input_grad[0]:
            dx = kernels.input_gradient(dy, weight)
            for one, up in zip(beside.adapters, ups, strict=True):
                one.add_input_gradient(dx, up, beside.stream)
            # this reduction overlaps the weights' gradients, which do not need it
            dx, summed = axis.reduce_begin(dx)
        if whole is not None:
            if weight.requires_grad:
                weight.accumulate(lambda total: kernels.add_weight_gradient(total, dy, whole()))
            for one, down, up in zip(beside.adapters, downs, ups, strict=True):
                one.accumulate((whole, lambda: dy), down.detach(), up, beside.stream)
        accumulate_bias_gradient(bias, dy)
        summed.wait()
        return dx, *[None] * (5 + 2 * len(ups))


class _RowLinear(Function):
    """The product x W^T plus the adapters' products, then the operator g, then + b."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        bias: Parameter | None,
        axis: TensorAxis,
        kernels: Kernels,
        beside: AdaptersBeside = NOTHING,
        *trained: Parameter,
    ) -> Tensor:
        ctx.layer = (weight, bias, axis, kernels, beside)
        y = kernels.linear(x, weight, bias if axis.size == 1 else None)
        downs = [one.add_to(y, x, beside.stream) for one in beside.adapters]
        ctx.save_for_backward(x if weight.requires_grad or downs else None, *downs)
        if axis.size == 1:
            return y
        y = axis.reduce(y)
        # after the sum: before it, every rank would add the bias (Shoeybi et al. 2019, section 3)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, axis, kernels, beside = ctx.layer
        x, *downs = ctx.saved_tensors
        # before the gather: a part, of this rank's positions, that is summed after the step
        accumulate_bias_gradient(bias, dy)
        whole = axis.gather(dy)
        ups = [one.up(whole) for one in beside.adapters]
        if x is not None:
            x = x.detach()
            # a split backward keeps this rank's positions, and gathers them again
            later = weight.puts_off and axis.divides_sequence
            every = Gathered(axis, dy) if later else lambda: whole
            if weight.requires_grad:
                weight.accumulate(lambda total: kernels.add_weight_gradient(total, every(), x))
            for one, down, up in zip(beside.adapters, downs, ups, strict=True):
                one.accumulate((lambda: x, every), down.detach(), up, beside.stream)
        nothing = [None] * (5 + 2 * len(ups))
        if not ctx.needs_input_grad[0]:
            return None, *nothing
        dx = kernels.input_gradient(whole, weight)
        for one, up in zip(beside.adapters, ups, strict=True):
            one.add_input_gradient(dx, up, beside.stream)
        return dx, *nothing


class ColumnParallelLinear(Computing):
    """A linear y = x W^T + b with the rows of W divided: [s, b, i] -> [s, b, o/t].

    `parts` are the output sizes, such as those of q, k and v. Each is divided separately, into at
    most `most` shares (see `Split`).
    """

    def __init__(
        self,
        axis: TensorAxis,
        inputs: int,
        parts: tuple[int, ...],
        bias: bool,
        init_std: float,
        most: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.axis = axis
        split = Split(0, parts, most)
        self.weight = declare(axis.size, (sum(parts), inputs), init_std, split=split)
        self.bias = declare(axis.size, (sum(parts),), "zeros", split=split) if bias else None
        self.adapters: Sequence[LowRankAdapter] = ()
        self.scales: Sequence[ScaleAdapter] = ()

    def forward(self, x: Tensor, stream: RandomStream | None = None) -> Tensor:
        beside = AdaptersBeside(self.adapters, stream)
        told = (self.weight, self.bias, self.axis, self.kernels, beside, *beside.trained)
        return rescaled(_ColumnLinear.apply(x, *told), self.scales)


class RowParallelLinear(Computing):
    """A linear y = x W^T + b with the columns of W divided: [s, b, i/t] -> [s, b, o]."""

    def __init__(
        self, axis: TensorAxis, inputs: int, outputs: int, bias: bool, init_std: float
    ) -> None:
        super().__init__()
        self.axis = axis
        self.weight = declare(axis.size, (outputs, inputs), init_std, split=Split(1, (inputs,)))
        self.bias = declare(axis.size, (outputs,), "zeros", shared_gradient=True) if bias else None
        self.adapters: Sequence[LowRankAdapter] = ()
        self.scales: Sequence[ScaleAdapter] = ()

    def forward(self, x: Tensor, stream: RandomStream | None = None) -> Tensor:
        beside = AdaptersBeside(self.adapters, stream)
        told = (self.weight, self.bias, self.axis, self.kernels, beside, *beside.trained)
        return _RowLinear.apply(rescaled(x, self.scales), *told)


class _Linear(Function):
    """The product x W^T + b with a weight that every rank holds whole."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Parameter, bias: Parameter | None, kernels: Kernels
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.layer = (weight, bias, kernels)
        return kernels.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        weight, bias, kernels = ctx.layer
        if weight.requires_grad:
            x = ctx.saved_tensors[0].detach()
            weight.accumulate(lambda total: kernels.add_weight_gradient(total, dy, x))
        accumulate_bias_gradient(bias, dy)
        dx = kernels.input_gradient(dy, weight) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


class ReplicatedLinear(Computing):
    """A linear y = x W^T + b on every rank alike: [..., i] -> [..., o], for x that every rank
    holds."""

    def __init__(self, inputs: int, outputs: int, bias: bool, init_std: float) -> None:
        super().__init__()
        self.weight = declare(1, (outputs, inputs), init_std)
        self.bias = declare(1, (outputs,), "zeros") if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return _Linear.apply(x, self.weight, self.bias, self.kernels)


class _SelectPositions(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis, ctx.shape, ctx.positions = axis, x.shape, positions
        return axis.gather(x).gather(0, positions[..., None].expand(-1, -1, x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        local, b, h = ctx.shape
        length = local * (ctx.axis.size if ctx.axis.divides_sequence else 1)
        # every rank has the whole gradient, and keeps its positions of it
        dx = dy.new_zeros((length, b, h))
        dx.scatter_add_(0, ctx.positions[..., None].expand(-1, -1, h), dy)
        return ctx.axis.between_blocks().of(dx), None, None


def select_positions(x: Tensor, positions: Tensor, axis: TensorAxis) -> Tensor:
    """Return the activations [k, b, h] at positions [k, b] of each sequence, whole on every
    rank."""
    return _SelectPositions.apply(x, positions, axis)


class _AddBias(Function):
    """An addition in place: a product with its bias would be a view, which the loss could not
    overwrite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Parameter) -> Tensor:
        ctx.bias = bias
        ctx.mark_dirty(x)
        return x.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        accumulate_bias_gradient(ctx.bias, dy)
        return dy, None


class VocabularyHead(Computing):
    """The linear from [s, b, h] to this rank's logits [s, b, ceil(V/t)], capped if `softcap` is not
    0; padded columns give -inf."""

    def __init__(
        self,
        axis: TensorAxis,
        vocab_size: int,
        hidden: int,
        init_std: float,
        bias: bool = False,
        softcap: float = 0.0,
    ) -> None:
        super().__init__()
        self.axis, self.softcap = axis, softcap
        split = Split(0, (vocab_size,))
        self.weight = declare(axis.size, (vocab_size, hidden), init_std, split=split)
        self.bias = declare(axis.size, (vocab_size,), "zeros", split=split) if bias else None
        share = -(-vocab_size // axis.size)
        self.valid_columns = max(0, min(share, vocab_size - axis.rank * share))

    def forward(self, x: Tensor) -> Tensor:
        logits = _ColumnLinear.apply(x, self.weight, None, self.axis, self.kernels)
        if self.bias is not None:
            logits = _AddBias.apply(logits, self.bias)
        if self.softcap:
            logits = soft_cap(logits, self.softcap)
        if self.valid_columns < logits.shape[-1]:
            logits = logits.clone()
            # exp(-inf) = 0: the softmax sees no token that is not in the vocabulary
            logits[..., self.valid_columns :] = -torch.inf
        return logits
