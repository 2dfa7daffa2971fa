"""RMSNorm and LayerNorm together with the residual sum before them, in one pass over memory.

For the residual x, the output y of a sublayer, weights w, and shifts c (LayerNorm only), over h
channels, the equations are

    r = x + y
    n = (r - mu) / sigma,  sigma^2 = mean((r - mu)^2) + eps
    z = n w + c

where mu = mean(r) for LayerNorm (Ba et al. 2016, arXiv 1607.06450), and mu = 0 for RMSNorm (Zhang
and Sennrich 2019, arXiv 1910.07467). With the gradient dr of the sum r, the gradient dz of the norm
z, and g = dz w, the backward is

    dx = dy = dr + (g - n mean(g n) - mean(g)) / sigma,    dw = sum dz n,    dc = sum dz

where RMSNorm has no term mean(g), and dw and dc are sums over all rows. For the backward the
kernels keep r and, for each row, mu and 1 / sigma. For each element of r, the forward reads and
writes 4 numbers in all if there is a y, and otherwise 2. The backward reads and writes 4 numbers in
all if there is a dr, and otherwise 3.

The reference implementations are `ptdmpi.model.kernels.norm.rms_norm` and
torch.nn.functional.layer_norm.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from ptdmpi.model.kernels.fused.launch import block_of, on_device_of, warps_of, wide
from ptdmpi.plan.layer.chunks import norm_programs


@triton.jit
def _forward(
    x,
    y,
    weight,
    shift,
    total,
    normed,
    means,
    scales,
    columns,
    ADDS: tl.constexpr,
    CENTRES: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute norms and the residual sums before them: each program of this Triton kernel computes
    one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    r = tl.load(x + row * columns + at, mask=inside, other=0.0).to(WIDE)
    if ADDS:
        r += tl.load(y + row * columns + at, mask=inside, other=0.0).to(WIDE)
        rounded = r.to(total.dtype.element_ty)
        tl.store(total + row * columns + at, rounded, mask=inside)
        r = rounded.to(WIDE)  # normalize the rounded sum, which later operations read
    if CENTRES:
        mean = tl.sum(r, 0) / columns
        tl.store(means + row, mean)
        r = tl.where(inside, r - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(r * r, 0) / columns + EPS)
    tl.store(scales + row, scale)
    z = r * scale * tl.load(weight + at, mask=inside, other=0.0).to(WIDE)
    if CENTRES:
        z += tl.load(shift + at, mask=inside, other=0.0).to(WIDE)
    tl.store(normed + row * columns + at, z.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    total,
    weight,
    means,
    scales,
    dnormed,
    dtotal,
    dx,
    by_weight,
    rows,
    columns,
    JOINS: tl.constexpr,
    CENTRES: tl.constexpr,
    TRAINS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute the backward: each of the n programs of this Triton kernel computes every n-th row.
    Each program also sums the gradients of the weights over its rows."""
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    w = tl.load(weight + at, mask=inside, other=0.0).to(WIDE)
    dweight = tl.full([BLOCK], 0.0, WIDE)
    dshift = tl.full([BLOCK], 0.0, WIDE)
    for row in range(program, rows, tl.num_programs(0)):
        begin = tl.cast(row, tl.int64) * columns
        n = tl.load(total + begin + at, mask=inside, other=0.0).to(WIDE)
        dz = tl.load(dnormed + begin + at, mask=inside, other=0.0).to(WIDE)
        scale = tl.load(scales + row)
        if CENTRES:
            n = tl.where(inside, n - tl.load(means + row), 0.0)
        n *= scale
        g = dz * w
        d = g - n * (tl.sum(g * n, 0) / columns)
        if CENTRES:
            d -= tl.sum(g, 0) / columns
            dshift += dz
        d *= scale
        if JOINS:
            d += tl.load(dtotal + begin + at, mask=inside, other=0.0).to(WIDE)
        tl.store(dx + begin + at, d.to(dx.dtype.element_ty), mask=inside)
        dweight += dz * n
    if TRAINS:
        # [2 for LayerNorm, programs, columns]
        tl.store(by_weight + program * columns + at, dweight, mask=inside)
        if CENTRES:
            by_shift = by_weight + tl.num_programs(0) * columns
            tl.store(by_shift + program * columns + at, dshift, mask=inside)


def add_and_normalize(
    x: Tensor, y: Tensor | None, weight: Tensor, shift: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + y [..., h], and the norm of this sum [..., h]: a LayerNorm if `shift` is given,
    otherwise an RMSNorm. If y is None, the sum is x itself. `weight` and `shift` are [h]."""
    total, normed = _AddNorm.apply(x, y, weight, shift, eps)
    return total, normed


class _AddNorm(Function):
    """The autograd Function of `add_and_normalize`: the residual sum x + y, and its norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, shift: Tensor | None, *rest: float
    ) -> tuple[Tensor, Tensor]:
        (eps,) = rest
        total = x = x.contiguous()
        if y is not None:
            y = y.contiguous()
            total = torch.empty_like(x)
        normed = torch.empty_like(x)
        columns = x.shape[-1]
        rows = x.numel() // columns
        vectors = 1 + (shift is not None)
        numbers = torch.empty(vectors, rows, dtype=_wide_type(x), device=x.device)
        means, scales = numbers[0], numbers[-1]
        block = block_of(columns)
        with on_device_of(x):
            _forward[(rows,)](
                x,
                x if y is None else y,
                weight,
                weight if shift is None else shift,
                total,
                normed,
                means,
                scales,
                columns=columns,
                ADDS=y is not None,
                CENTRES=shift is not None,
                EPS=eps,
                BLOCK=block,
                WIDE=wide(x),
                num_warps=warps_of(block),
            )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, weight, shift, means, scales)
        ctx.adds = y is not None
        return total, normed

    @staticmethod
    def backward(
        ctx: Any, dtotal: Tensor | None, dnormed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        total, weight, shift, means, scales = ctx.saved_tensors
        if dnormed is None:  # nothing reads the norm, so it has no gradient
            return dtotal, dtotal if ctx.adds else None, None, None, None
        columns = total.shape[-1]
        rows = total.numel() // columns
        programs = norm_programs(rows)
        trains = ctx.needs_input_grad[2]
        vectors = (1 + (shift is not None)) * trains
        by_weight = torch.empty(vectors, programs, columns, dtype=scales.dtype, device=total.device)
        dx = torch.empty_like(total)
        dnormed = dnormed.contiguous()
        block = block_of(columns)
        with on_device_of(total):
            _backward[(programs,)](
                total,
                weight,
                means,
                scales,
                dnormed,
                dnormed if dtotal is None else dtotal.contiguous(),
                dx,
                by_weight if trains else scales,
                rows=rows,
                columns=columns,
                JOINS=dtotal is not None,
                CENTRES=shift is not None,
                TRAINS=trains,
                BLOCK=block,
                WIDE=wide(total),
                num_warps=warps_of(block),
            )
        dweight, dshift = _of_vectors(by_weight, weight, shift)
        return dx, dx if ctx.adds else None, dweight, dshift, None


def _of_vectors(
    by_weight: Tensor, weight: Tensor, shift: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the weights and of the shifts. `by_weight` [vectors, programs,
    columns] has the sums that each program computed over its rows: the first vector is for the
    weights, and the second for the shifts, if there are any."""
    if not len(by_weight):
        return None, None
    sums = by_weight.sum(1)
    if shift is None:
        return sums[0].to(weight.dtype), None
    return sums[0].to(weight.dtype), sums[1].to(shift.dtype)


def _wide_type(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
