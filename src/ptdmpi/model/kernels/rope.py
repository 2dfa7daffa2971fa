"""RoPE (rotary position embedding): the rotation of queries and keys by angles that depend on the
position, in few kernels that save no tensors for the backward."""

from typing import Any

from torch import Tensor
from torch.autograd import Function


class _Turn(Function):
    """The rotation by RoPE's angles, with four kernels in the forward and four in the backward. No
    activations are saved. With plain torch operations, autograd would use five kernels and one more
    copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.angles = (cos, sin)
        turned = x * cos
        other = x * sin  # both halves of a head have the same angles
        first, second = turned.chunk(2, dim=-1)
        other_first, other_second = other.chunk(2, dim=-1)
        first.sub_(other_second)
        second.add_(other_first)
        return turned

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.angles
        dx = dy * cos
        other = dy * sin
        first, second = dx.chunk(2, dim=-1)
        other_first, other_second = other.chunk(2, dim=-1)
        first.add_(other_second)
        second.sub_(other_first)
        return dx, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [s, b, heads, head size] rotated by the angles of its positions: x cos + (-second
    half of x, first half of x) sin. The type of `cos` and `sin` must not be wider than the type of
    x."""
    return _Turn.apply(x, cos, sin)
