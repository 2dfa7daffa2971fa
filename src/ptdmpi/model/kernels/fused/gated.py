"""Gated units (Shazeer 2020, arXiv 2002.05202) in one pass over memory, forward and backward.

For the gate g and the value v, which are the halves of the input x [..., 2 width], and for the
gradient dy of the output, the equations are

    y  = act(g) v
    dg = act'(g) v dy,    dv = act(g) dy

S is the logistic function. For "swiglu", act(g) = g S(g). For "geglu", act is GELU in its tanh
form: act(g) = g S(z) with z = 2 sqrt(2 / pi) (g + 0.044715 g^3). In both cases act'(g) =
S(z) + g S(z) (1 - S(z)) z', where z = g for "swiglu".

For each output, the forward reads or writes 3 numbers, and the backward 5. The reference
implementation is `_Gated` in `ptdmpi.model.kernels.activation`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ptdmpi.model.kernels.fused.launch import block_of, on_device_of, warps_of, wide
from ptdmpi.model.kernels.tanh_form import CUBE, SLOPE

BLOCK = 1024  # the largest number of outputs that a program computes


@triton.jit
def _sigmoid(z):
    """Return the sigmoid 1 / (1 + exp(-z)). It is computed from exp(-|z|), which cannot
    overflow."""
    small = tl.exp(-tl.abs(z))
    return tl.where(z < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def _forward(
    x,
    y,
    width,
    GELU: tl.constexpr,
    SLOPE: tl.constexpr,
    CUBE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute gated units: each program of this Triton kernel computes up to BLOCK outputs of one
    row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x += 2 * row * width
    gate = tl.load(x + at, mask=inside, other=0.0).to(WIDE)
    value = tl.load(x + width + at, mask=inside, other=0.0).to(WIDE)
    z = gate
    if GELU:
        z = SLOPE * (gate + CUBE * gate * gate * gate)
    result = gate * _sigmoid(z) * value
    tl.store(y + row * width + at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x,
    dy,
    dx,
    width,
    GELU: tl.constexpr,
    SLOPE: tl.constexpr,
    CUBE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute the backward of gated units: each program of this Triton kernel computes the
    gradients of up to BLOCK gates of one row, and of their values."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x += 2 * row * width
    dx += 2 * row * width
    gate = tl.load(x + at, mask=inside, other=0.0).to(WIDE)
    value = tl.load(x + width + at, mask=inside, other=0.0).to(WIDE)
    upper = tl.load(dy + row * width + at, mask=inside, other=0.0).to(WIDE)
    z = gate
    inner = gate  # g z' (see the module docstring)
    if GELU:
        cube = CUBE * gate * gate * gate
        z = SLOPE * (gate + cube)
        inner = SLOPE * (gate + 3.0 * cube)
    sigmoid = _sigmoid(z)
    # S(-z) has no rounding error, but 1 - S(z) would have one
    slope = sigmoid + inner * sigmoid * _sigmoid(-z)
    tl.store(dx + at, (slope * value * upper).to(dx.dtype.element_ty), mask=inside)
    dvalue = gate * sigmoid * upper
    tl.store(dx + width + at, dvalue.to(dx.dtype.element_ty), mask=inside)


def forward(x: Tensor, activation: str) -> Tensor:
    """Return act(gate) * value [..., width] for a contiguous x [..., 2 width]. `activation` is
    "swiglu" or "geglu"."""
    width = x.shape[-1] // 2
    y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    _launch(_forward, (x, y), width, activation)
    return y


def backward(x: Tensor, dy: Tensor, activation: str) -> Tensor:
    """Return the gradient of x [..., 2 width] for the gradient dy [..., width] of the output. Both
    arguments must be contiguous."""
    dx = torch.empty_like(x)
    _launch(_backward, (x, dy, dx), dy.shape[-1], activation)
    return dx


def _launch(
    kernel: triton.JITFunction, tensors: tuple[Tensor, ...], width: int, activation: str
) -> None:
    x = tensors[0]
    block = block_of(width, BLOCK)
    grid = (x.numel() // max(1, 2 * width), -(-width // block))
    if not x.numel():
        return
    with on_device_of(x):
        kernel[grid](
            *tensors,
            width=width,
            GELU=activation == "geglu",
            SLOPE=SLOPE,
            CUBE=CUBE,
            BLOCK=block,
            WIDE=wide(x),
            num_warps=warps_of(block),
        )
