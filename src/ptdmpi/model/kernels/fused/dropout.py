"""Dropout in one pass over memory, forward and backward.

For the input x [s, b, h], the probability r of zero, and the mask m of the random stream, the
equations are

    y = x m / (1 - r),    dx = dy m / (1 - r)

An element of m is a hash of the stream's key, the sample, the position and the channel, computed as
in `RandomStream.hidden_mask` of `ptdmpi.model.random`. Because every pass computes the hash again,
no mask is stored. Each pass reads one number and writes one number for each element. For each row,
it also reads the position and the sample, 8 bytes each. The reference implementation is
`ptdmpi.model.random.dropout`, which gives the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ptdmpi.model.kernels.fused.launch import block_of, on_device_of, warps_of, wide
from ptdmpi.model.random import GOLDEN, MIX_1, MIX_2, RandomStream, threshold_of

BLOCK = 1024  # the largest number of elements that a program computes


@triton.jit
def _shift_right(value, bits: tl.constexpr):
    """Return `value`, int64, shifted to the right, with zeros in the free bits."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def _mix(value, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
    """Return the same bijection of int64 values as `ptdmpi.model.random.mix`."""
    value = (value ^ _shift_right(value, 30)) * MIX_1
    value = (value ^ _shift_right(value, 27)) * MIX_2
    return value ^ _shift_right(value, 31)


@triton.jit
def _drop(
    x,
    y,
    samples,
    positions,
    key,
    first_channel,
    batch,
    width,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    GOLDEN: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute dropout: each program of this Triton kernel computes up to BLOCK elements of one
    row, which is a position of a sample."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    sample = tl.load(samples + row % batch)
    position = tl.load(positions + row // batch)
    hashed = _mix(_mix(sample + key, MIX_1, MIX_2) + position * GOLDEN, MIX_1, MIX_2)
    channel = at.to(tl.int64) + first_channel
    bits = _shift_right(_mix(hashed + channel * GOLDEN, MIX_1, MIX_2), 32)
    keep = (bits >= THRESHOLD).to(WIDE)
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(WIDE)
    # multiply by the mask, as the reference does: a product with zero keeps the sign of x
    result = value * keep * tl.full([BLOCK], SCALE, WIDE)
    tl.store(y + row * width + at, result.to(y.dtype.element_ty), mask=inside)


def dropped(x: Tensor, stream: RandomStream, rate: float) -> Tensor:
    """Return x [s, b, h] after dropout. The mask of `stream` determines which elements become zero,
    each with probability `rate`. The other elements are divided by 1 - rate. x must be
    contiguous."""
    s, batch, width = x.shape
    y = torch.empty_like(x)
    if not x.numel():
        return y
    block = block_of(width, BLOCK)
    with on_device_of(x):
        _drop[(s * batch, -(-width // block))](
            x,
            y,
            stream.samples,
            stream.positions.numbers(s, x.device),
            stream.key,
            stream.first_channel,
            batch,
            width,
            THRESHOLD=threshold_of(rate),
            SCALE=1.0 / (1.0 - rate),
            GOLDEN=GOLDEN,
            MIX_1=MIX_1,
            MIX_2=MIX_2,
            BLOCK=block,
            WIDE=wide(x),
            num_warps=warps_of(block),
        )
    return y
