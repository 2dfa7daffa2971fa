"""The selection of positions whose activations an output needs, such as the masked positions."""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from ptdmpi.model.tensor_parallel import TensorAxis


class _SelectPositions(Function):
    """The selection of the activations at some positions. Every tensor rank gets all selected
    activations. In the backward, each rank gets the gradient of the positions that it has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        ctx.shape = x.shape
        ctx.positions = positions
        return axis.gather(x).gather(0, positions[..., None].expand(-1, -1, x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        local, b, h = ctx.shape
        length = local
        if ctx.axis.divides_sequence:
            length *= ctx.axis.size
        # every rank has the full gradient, and returns only its own positions
        dx = dy.new_zeros((length, b, h))
        dx.scatter_add_(0, ctx.positions[..., None].expand(-1, -1, h), dy)
        return ctx.axis.between_blocks().of(dx), None, None


def select_positions(x: Tensor, positions: Tensor, axis: TensorAxis) -> Tensor:
    """Return the activations [k, b, h] at `positions` [k, b], k positions of each of b sequences.
    The result is the same on every tensor rank."""
    return _SelectPositions.apply(x, positions, axis)
