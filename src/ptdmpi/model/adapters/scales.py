"""(IA)^3 adapters: a trained factor for each channel of an activation (Liu et al. 2022, arXiv
2205.05638, section 3.3)."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from ptdmpi.model.parameters import Parameter, Split, declare
from ptdmpi.plan.layer.parts import Scale


class ScaleAdapter(nn.Module):
    """Trained factors for the channels `columns` of a linear's output or input on this tensor rank,
    one factor for each channel."""

    def __init__(self, part: Scale, tensor_size: int, columns: slice) -> None:
        super().__init__()
        self.columns = columns
        split = Split.of_one(0, part.size, part.most)
        self.weight = declare(tensor_size, (part.size,), "ones", split=split)


def rescaled(x: Tensor, adapters: Sequence[ScaleAdapter]) -> Tensor:
    """Return x [s, b, c] with the channels of each adapter multiplied by its factors."""
    if not adapters:
        return x
    scales = [(adapter.columns, adapter.weight) for adapter in adapters]
    return _Rescale.apply(x, scales, *(weight for _, weight in scales))


class _Rescale(Function):
    """An autograd Function that multiplies some channels by their factors. It saves the input
    values of these channels for the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scales: Sequence[tuple[slice, Parameter]], *weights: Tensor
    ) -> Tensor:
        ctx.scales = scales
        y = x.clone()
        kept = []
        for columns, weight in scales:
            y[..., columns].mul_(weight)
            # if all channels are scaled, save x itself, which needs no additional memory; otherwise
            # save a copy of the scaled channels
            part = x[..., columns]
            if part.shape != x.shape:
                part = part.clone()
            kept.append(part)
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        for (columns, weight), part in zip(ctx.scales, ctx.saved_tensors, strict=True):
            _accumulate(weight, dy[..., columns], part.detach())
        nothing = (None,) * (1 + len(ctx.scales))
        if not ctx.needs_input_grad[0]:
            return None, *nothing
        dx = dy.clone()
        for columns, weight in ctx.scales:
            dx[..., columns].mul_(weight)
        return dx, *nothing


def _accumulate(weight: Parameter, dy: Tensor, x: Tensor) -> None:
    """Add the sum of `dy * x` over all positions to the gradient buffer of the factors `weight`.
    `dy` [s, b, c] is the gradient of the scaled channels, and `x` [s, b, c] has their values before
    they were scaled. The sum is computed in the data type of the gradient buffer."""
    if weight.requires_grad:
        weight.accumulate(lambda total: total.add_((dy.to(total.dtype) * x).flatten(0, -2).sum(0)))
