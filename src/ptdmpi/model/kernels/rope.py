"""RoPE (rotary position embedding): the rotation of queries and keys by angles that depend on the
position. It takes few kernels, which save no tensors for the backward."""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from ptdmpi.model.kernels import USUAL, Computing, Kernels


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


class _FusedTurn(Function):
    """The rotation by RoPE's angles by one kernel in Triton, forward and backward. No activations
    are saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from ptdmpi.model.kernels.fused.rope import turned

        ctx.angles = (cos, sin)
        return turned(x if x.stride(-1) == 1 else x.contiguous(), cos, sin)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        from ptdmpi.model.kernels.fused.rope import turned

        return turned(dy.contiguous(), *ctx.angles, back=True), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, kernels: Kernels = USUAL) -> Tensor:
    """Return x [s, b, heads, head size] rotated by the angles of its positions: x cos + (-second
    half of x, first half of x) sin. `cos` and `sin` are [s, 1, 1, head size], or [s, b, 1, head
    size] if each sequence has angles of its own. Their type must not be wider than the type of
    x."""
    turn = _FusedTurn if kernels.by_triton("rope") else _Turn
    return turn.apply(x, cos, sin)


class Rotating:
    """The base class of functions that make the queries and keys of a layer. `rotary` has the
    cosines and sines of the rotary angles, [s, 1, 1, rotated elements] each; None until the stage
    provides them."""

    rotary: tuple[Tensor, Tensor] | None = None


class Rotation(Computing):
    """The rotation of the queries and keys of a layer, which has no parameters."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x rotated; see `rotate`."""
        return rotate(x, cos, sin, self.kernels)
