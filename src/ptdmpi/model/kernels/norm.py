"""RMSNorm and the soft cap of scores and logits. Each of them is one autograd Function that saves
few tensors."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


class _RmsNorm(Function):
    """The function RMSNorm. For the backward it saves its input and one number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        dnormed = dy * weight.to(scale.dtype)
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = (dy * normed).flatten(0, -2).sum(0).to(weight.dtype)
        # the derivative of equation 4 is dx = (g - n mean(g n)) / rms, where n = x / rms and g = dy
        # * weight
        projection = (dnormed * normed).mean(-1, keepdim=True)
        dx = dnormed.sub_(normed.mul_(projection)).mul_(scale)
        return dx.to(x.dtype), dweight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in float32 or wider
    (Zhang and Sennrich 2019, arXiv 1910.07467, equation 4)."""
    if x.device.type == "cpu" or weight.dtype != x.dtype:
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class _Cap(Function):
    """The function soft cap. For the backward it saves only tanh(x / cap), and not its result,
    because the loss may overwrite the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        tangent = (x / cap).tanh_()
        ctx.save_for_backward(tangent)
        return tangent * cap

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (tangent,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(dy, tangent), None


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), between -cap and cap (Gemma Team 2024, arXiv 2408.00118, section
    2)."""
    return _Cap.apply(x, cap)
