"""RoPE: positions turned by their angles, in few kernels that keep nothing."""

from typing import Any

from torch import Tensor
from torch.autograd import Function


class _Turn(Function):
    """Four kernels each way, where autograd makes five of one more copy, and nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.angles = (cos, sin)
        turned, other = x * cos, x * sin  # both halves have the same angles
        first, second = turned.chunk(2, dim=-1)
        other_first, other_second = other.chunk(2, dim=-1)
        first.sub_(other_second)
        second.add_(other_first)
        return turned

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.angles
        dx, other = dy * cos, dy * sin
        first, second = dx.chunk(2, dim=-1)
        other_first, other_second = other.chunk(2, dim=-1)
        first.add_(other_second)
        second.sub_(other_first)
        return dx, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [s, b, a, head size] turned by its position's angles, which are no wider than x:
    x cos + (-second half, first half) sin."""
    return _Turn.apply(x, cos, sin)
