"""GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415) of the sum of a linear layer's outputs and its
bias, in one pass over memory, forward and backward.

For the outputs x [rows, columns] without the bias, the bias b [columns], and the gradient dy of the
result, the equations are

    z = x + b,    y = GELU(z)
    dx = GELU'(z) dy,    db = sum dx

where db is a sum over all rows. The exact form is GELU(z) = z P(z), with the distribution function
P and the density p of the standard normal distribution, and GELU'(z) = P(z) + z p(z). The tanh form
is z S(u) with u = 2 sqrt(2 / pi) (z + 0.044715 z^3) and the logistic function S, and its derivative
is S(u) + z S(u) (1 - S(u)) u'.

For each element, the forward reads or writes 2 numbers, and the backward 3. Each program of the
backward also writes its sums of dx over some of the rows, and another kernel adds these sums to db,
in the order of the programs. The reference implementation is `gelu` in
`ptdmpi.model.kernels.activation`, after a linear layer that adds the bias and sums its gradient.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ptdmpi.model.kernels.fused.launch import block_of, on_device_of, warps_of, wide
from ptdmpi.model.kernels.tanh_form import CUBE, SLOPE
from ptdmpi.plan.layer.chunks import norm_programs

BLOCK = 1024  # the largest number of columns that a program computes
ROOT = math.sqrt(0.5)  # P(z) = (1 + erf(ROOT z)) / 2
DENSITY = 1.0 / math.sqrt(2.0 * math.pi)  # p(0)


@triton.jit
def _logistic(u):
    """Return 1 / (1 + exp(-u)). It is computed from exp(-|u|), which cannot overflow."""
    small = tl.exp(-tl.abs(u))
    return tl.where(u < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def _forward(
    x,
    bias,
    y,
    columns,
    EXACT: tl.constexpr,
    ROOT: tl.constexpr,
    SLOPE: tl.constexpr,
    CUBE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute GELU: each program of this Triton kernel computes up to BLOCK elements of one row."""
    begin = tl.program_id(0).to(tl.int64) * columns
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    z = tl.load(x + begin + at, mask=inside, other=0.0).to(WIDE)
    z += tl.load(bias + at, mask=inside, other=0.0).to(WIDE)
    if EXACT:
        result = z * (0.5 * (1.0 + tl.erf(ROOT * z)))
    else:
        result = z * _logistic(SLOPE * (z + CUBE * z * z * z))
    tl.store(y + begin + at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x,
    bias,
    dy,
    dx,
    sums,
    rows,
    columns,
    EXACT: tl.constexpr,
    TRAINS: tl.constexpr,
    ROOT: tl.constexpr,
    DENSITY: tl.constexpr,
    SLOPE: tl.constexpr,
    CUBE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute the backward of GELU: for up to BLOCK columns, each of the n programs of this Triton
    kernel computes every n-th row, and the sums of the gradients over these rows."""
    program = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    b = tl.load(bias + at, mask=inside, other=0.0).to(WIDE)
    total = tl.full([BLOCK], 0.0, WIDE)
    for row in range(program, rows, tl.num_programs(0)):
        begin = tl.cast(row, tl.int64) * columns
        z = b + tl.load(x + begin + at, mask=inside, other=0.0).to(WIDE)
        d = tl.load(dy + begin + at, mask=inside, other=0.0).to(WIDE)
        if EXACT:
            d *= 0.5 * (1.0 + tl.erf(ROOT * z)) + z * DENSITY * tl.exp(-0.5 * z * z)
        else:
            cube = CUBE * z * z * z
            u = SLOPE * (z + cube)
            sigmoid = _logistic(u)
            # S(-u) has no rounding error, but 1 - S(u) would have one
            d *= sigmoid + SLOPE * (z + 3.0 * cube) * sigmoid * _logistic(-u)
        tl.store(dx + begin + at, d.to(dx.dtype.element_ty), mask=inside)
        total += d
    if TRAINS:
        # [programs, columns]
        tl.store(sums + program.to(tl.int64) * columns + at, total, mask=inside)


@triton.jit
def _add(sums, dbias, programs, columns, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Add up the sums of all programs of `_backward`, in their order, for up to BLOCK columns."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    total = tl.full([BLOCK], 0.0, WIDE)
    for program in range(programs):
        total += tl.load(sums + program * columns + at, mask=inside, other=0.0)
    tl.store(dbias + at, total, mask=inside)


def forward(x: Tensor, bias: Tensor, *, exact: bool) -> Tensor:
    """Return GELU(x + bias) for a contiguous x [..., columns] and bias [columns]: the exact form if
    `exact` is True, otherwise the tanh form."""
    y = torch.empty_like(x)
    columns = x.shape[-1]
    block = block_of(columns, BLOCK)
    if x.numel():
        with on_device_of(x):
            _forward[(x.numel() // columns, -(-columns // block))](
                x,
                bias,
                y,
                columns=columns,
                EXACT=exact,
                ROOT=ROOT,
                SLOPE=SLOPE,
                CUBE=CUBE,
                BLOCK=block,
                WIDE=wide(x),
                num_warps=warps_of(block),
            )
    return y


def backward(
    x: Tensor, bias: Tensor, dy: Tensor, *, exact: bool, trains: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of x [..., columns], and the gradient of the bias [columns] in float32 or
    wider. The second is None if `trains` is False. `x` and the gradient `dy` of the result must be
    contiguous."""
    dx = torch.empty_like(x)
    columns = x.shape[-1]
    rows = x.numel() // columns
    programs = norm_programs(rows)
    block = block_of(columns, BLOCK)
    blocks = -(-columns // block)
    dtype = torch.promote_types(x.dtype, torch.float32)
    sums = torch.empty(programs * trains, columns, dtype=dtype, device=x.device)
    dbias = torch.empty(columns, dtype=dtype, device=x.device) if trains else None
    with on_device_of(x):
        _backward[(programs, blocks)](
            x,
            bias,
            dy,
            dx,
            sums,
            rows=rows,
            columns=columns,
            EXACT=exact,
            TRAINS=trains,
            ROOT=ROOT,
            DENSITY=DENSITY,
            SLOPE=SLOPE,
            CUBE=CUBE,
            BLOCK=block,
            WIDE=wide(x),
            num_warps=warps_of(block),
        )
        if dbias is not None:
            _add[(blocks,)](
                sums,
                dbias,
                programs=programs,
                columns=columns,
                BLOCK=block,
                WIDE=wide(x),
                num_warps=warps_of(block),
            )
    return dx, dbias
