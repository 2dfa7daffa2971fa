"""A column-parallel linear whose outputs are computed in parts, each by a separate matrix product.
A message with the result of one part can then overlap with the product of the next part.

The parts share the collectives of the tensor axis (`model/tensor_parallel.py`): the input is
gathered only once. In the backward every part computes a gradient of the input. These gradients are
added, and only their sum is all-reduced over the axis.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Function

from ptdmpi.comm.communicator import DONE, Handle
from ptdmpi.model.adapters.columns import of_columns
from ptdmpi.model.adapters.scales import rescaled
from ptdmpi.model.random import RandomStream
from ptdmpi.model.tensor_parallel import (
    ColumnParallelLinear,
    Gathered,
    LinearPass,
    accumulate_bias_gradient,
)


@dataclass(kw_only=True)
class _Part(LinearPass):
    """One forward pass of a linear that computes only the outputs `columns`."""

    columns: slice

    def own(self, rows: Tensor) -> Tensor:
        """Return the part of `rows` that belongs to the outputs `columns`. `rows` is a weight, a
        bias or a gradient, with one row for each output of the linear."""
        return rows[self.columns]


class ColumnParts:
    """One forward pass of a column-parallel linear, and its backward, in `count` parts. The weight
    must not be quantized, because every part would dequantize the complete weight."""

    def __init__(
        self, linear: ColumnParallelLinear, x: Tensor, stream: RandomStream | None, *, count: int
    ) -> None:
        """Begin the pass, in `count` parts, for the input `x`, [s, b, i]. `stream` is the random
        stream for the adapters' dropout."""
        self._linear = linear
        self._stream = stream
        self._local: Tensor | None = x
        self._shared = _Shared(count)

    def product(self, columns: slice) -> Tensor:
        """Return the outputs `columns` of the linear, [s, b, columns]. The backward must be run for
        every part, because only the backward of the last part returns the gradient of the input."""
        linear = self._linear
        part = _Part(
            weight=linear.weight,
            bias=linear.bias,
            axis=linear.axis,
            kernels=linear.kernels,
            adapters=of_columns(linear.adapters, columns),
            stream=self._stream,
            columns=columns,
        )
        y = _ColumnPart.apply(self._local, part, self._shared, *part.parameters)
        return rescaled(y, of_columns(linear.scales, columns))


class _Shared:
    """The tensors that all parts of one forward pass and its backward share. The forward shares one
    tensor: the input at all positions. The backward shares two: the input, gathered again, and the
    sum of the parts' gradients of the input."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._left = count
        self._whole: Tensor | None = None
        self._again: Gathered | None = None
        self._sum: Tensor | None = None

    def _ends(self) -> bool:
        """Record that one more part was computed. Return True if it is the last part of the forward
        or of the backward."""
        self._left = (self._left or self._count) - 1
        return self._left == 0

    def input(self, x: Tensor, part: _Part) -> Tensor:
        """Return the input at all positions; the call of the first part gathers the input."""
        whole = part.axis.gather(x) if self._whole is None else self._whole
        self._whole = None if self._ends() else whole
        return whole

    def input_again(self, x: Tensor | None, part: _Part) -> Gathered | None:
        """Return the input for the gradients of weights, or None if no gradient of the part needs
        it. The call for the first part decides whether the gather of the input begins early, by the
        same rule as in a linear without parts."""
        if x is not None and self._again is None:
            early = part.axis.comm.overlaps and not part.weight.puts_off
            self._again = Gathered(part.axis, x.detach, early)
        return None if x is None else self._again

    def add(self, gradient: Tensor | None, part: _Part) -> tuple[Tensor | None, Handle]:
        """Add the part's gradient of the input to the sum over all parts. The call for the last
        part begins the all-reduce over the tensor axis, and returns its result. The calls for other
        parts return None."""
        if gradient is not None and self._sum is not None:
            gradient = self._sum.add_(gradient)
        self._sum = gradient
        if not self._ends():
            return None, DONE
        self._sum = self._again = None
        return (None, DONE) if gradient is None else part.axis.reduce_begin(gradient)


class _ColumnPart(Function):
    """One part of a column-parallel linear: x W^T + b plus the adapters' products, for some columns
    of the outputs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, part: _Part, shared: _Shared, *parameters: Tensor | None
    ) -> Tensor:
        whole = shared.input(x, part)
        bias = None if part.bias is None else part.own(part.bias)
        y = part.kernels.linear(whole, part.own(part.weight), bias)
        kept = x if part.needs_input else None
        ctx.save_for_backward(kept, *part.add_adapters(y, whole))
        ctx.part = part
        ctx.shared = shared
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        part: _Part = ctx.part
        x, *downs = ctx.saved_tensors
        whole = ctx.shared.input_again(x, part)
        ups = [adapter.up(dy) for adapter in part.adapters]
        gradient = part.input_gradient(dy, ups) if ctx.needs_input_grad[0] else None
        # this all-reduce overlaps with the computation of the weights' gradients, which do not need
        # its result
        dx, summed = ctx.shared.add(gradient, part)
        if whole is not None:
            part.accumulate(whole, lambda: dy, downs, ups)
        accumulate_bias_gradient(part.bias, dy, part.own)
        summed.wait()
        # the gradients of parameters are added to `main_grad`
        return dx, *[None] * (len(ctx.needs_input_grad) - 1)
