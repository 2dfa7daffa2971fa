"""Norms (LayerNorm and RMSNorm), and the soft cap of scores and logits. One kernel can compute a
norm together with the residual sum before it. RMSNorm and the soft cap are autograd Functions that
save few tensors."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ptdmpi.config import ModelConfig
from ptdmpi.model.kernels import USUAL, Computing, Kernels
from ptdmpi.model.parameters import declare
from ptdmpi.plan.layer import describe


class _RmsNorm(Function):
    """RMSNorm as an autograd Function. For the backward, it saves its input and one number for each
    row."""

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
        # the derivative of RMSNorm (see `rms_norm`) is dx = (g - n mean(g n)) / rms, where n = x /
        # rms and g = dy weight
        projection = (dnormed * normed).mean(-1, keepdim=True)
        dx = dnormed.sub_(normed.mul_(projection)).mul_(scale)
        return dx.to(x.dtype), dweight, None


class _RmsNormByRows(Function):
    """RMSNorm by the operations of `_RmsNorm`, computed for a few rows at a time, so that these
    rows stay in the caches of a core. The results have the same bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, elements: int) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        out = torch.empty_like(flat)
        scale = flat.new_empty((len(flat), 1), dtype=torch.promote_types(x.dtype, torch.float32))
        for rows in _row_slices(flat, elements):
            wide = flat[rows].to(scale.dtype)
            factor = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
            scale[rows] = factor
            out[rows] = (wide * factor).mul_(weight)
        ctx.save_for_backward(flat, weight, scale)
        ctx.elements = elements
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        flat, weight, scale = ctx.saved_tensors
        dflat = dy.reshape(flat.shape)
        wide_weight = weight.to(scale.dtype)
        dx = torch.empty_like(flat)
        # The products of all rows are summed at once. If they were summed for a few rows at a time,
        # the sums would be rounded differently.
        products = (
            flat.new_empty(flat.shape, dtype=scale.dtype) if ctx.needs_input_grad[1] else None
        )
        for rows in _row_slices(flat, ctx.elements):
            normed = flat[rows] * scale[rows]
            if products is not None:
                torch.mul(dflat[rows], normed, out=products[rows])
            dnormed = dflat[rows] * wide_weight
            projection = (dnormed * normed).mean(-1, keepdim=True)
            dx[rows] = dnormed.sub_(normed.mul_(projection)).mul_(scale[rows])
        dweight = None if products is None else products.sum(0).to(weight.dtype)
        return dx.view(dy.shape), dweight, None, None


def _row_slices(flat: Tensor, elements: int) -> Iterator[slice]:
    """Yield slices of the rows of `flat` [n, h] with about `elements` elements each."""
    step = max(1, elements // flat.shape[-1])
    for first in range(0, len(flat), step):
        yield slice(first, first + step)


def rms_norm(x: Tensor, weight: Tensor, eps: float, kernels: Kernels = USUAL) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in float32 or wider
    (Zhang and Sennrich 2019, arXiv 1910.07467, equation 4). On a CPU, the choice of `kernels`
    determines how many elements are computed at a time."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        elements = kernels.chosen("cpu", x.dtype).norm
        if elements is not None and elements < x.numel() and x.is_contiguous():
            return _RmsNormByRows.apply(x, weight, eps, elements)
    if x.device.type == "cpu" or weight.dtype != x.dtype:
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class _Cap(Function):
    """The soft cap as an autograd Function. For the backward, it saves only tanh(x / cap). It does
    not save its result, because the loss may overwrite the result."""

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


class Norm(Computing):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) over the last dim."""

    def __init__(
        self,
        model: ModelConfig,
        *,
        shared_gradient: bool = True,
        size: int | None = None,
        partial_gradient: bool = False,
    ) -> None:
        """Declare the parameters. `size` is the size of the last dim; None means the hidden size.
        `shared_gradient` is True if, under sequence parallelism, the input has only this rank's
        positions. `partial_gradient` is True if the input has only this rank's heads (see
        `Declaration`)."""
        super().__init__()
        self.eps = model.norm_eps
        self.of_hidden = size is None
        self.shape = (model.hidden if size is None else size,)
        self.zero_centered = model.zero_centered_norm
        sums = {"shared_gradient": shared_gradient, "partial_gradient": partial_gradient}
        self.weight = declare(1, self.shape, "zeros" if self.zero_centered else "ones", **sums)
        shift = describe.norm_part(model).shift
        self.bias = declare(1, self.shape, "zeros", **sums) if shift else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized activations, which have the shape of x [..., h]."""
        # the kernel in Triton is made for rows of the hidden size; the rows of a norm over single
        # heads are shorter
        if self.of_hidden and self.kernels.by_triton("norm"):
            return self.of_sum(x, None)[1]
        weight = self._gain()
        if self.bias is None:
            return rms_norm(x, weight, self.eps, self.kernels)
        if weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        return F.layer_norm(x, self.shape, weight, self.bias, self.eps)

    def of_sum(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the residual sum x + y and its norm, both computed by one kernel in Triton. The
        shapes are [..., h]. If y is None, the sum is x itself. The backward also adds the gradients
        of both results."""
        from ptdmpi.model.kernels.fused.norm import add_and_normalize

        return add_and_normalize(x, y, self._gain(), self.bias, eps=self.eps)

    def _gain(self) -> Tensor:
        """Return the factor of each normalized channel: the weight w, or 1 + w for a zero-centered
        norm."""
        weight: Tensor = self.weight
        if self.zero_centered:  # compute 1 + w in float32, because 16-bit types round small w away
            weight = 1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32))
        return weight
