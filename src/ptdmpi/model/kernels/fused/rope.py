"""RoPE (Su et al. 2021, arXiv 2104.09864) in one pass over memory, forward and backward.

Let x1 and x2 be the halves of a head of the input, and let c and s be the cosines and sines of the
position's angles. Both halves have the same angles. The equations are

    y1 = x1 c - x2 s,    y2 = x2 c + x1 s

The backward is the rotation by the negative angles. Each pass reads one number and writes one
number for each element, and reads the angles, which all sequences and heads share. The reference
implementation is `_Turn` in `ptdmpi.model.kernels.rope`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ptdmpi.model.kernels.fused.launch import block_of, on_device_of, warps_of, wide

BLOCK = 512  # the largest number of pairs of elements that a program rotates


@triton.jit
def _turn(
    x,
    y,
    cos,
    sin,
    batch,
    pairs,
    position_stride,
    sequence_stride,
    head_stride,
    angle_stride,
    angle_sequence_stride,
    HALF: tl.constexpr,
    BACK: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rotate heads: each program of this Triton kernel rotates up to BLOCK pairs of elements at one
    position of one sequence. If BACK is True, it rotates by the negative angles."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pairs
    head, place = at // HALF, at % HALF
    position, sequence = row // batch, row % batch
    x += position * position_stride + sequence * sequence_stride
    y += 2 * row * pairs
    source = head * head_stride + place
    first = tl.load(x + source, mask=inside, other=0.0).to(WIDE)
    second = tl.load(x + source + HALF, mask=inside, other=0.0).to(WIDE)
    angle = position * angle_stride + sequence * angle_sequence_stride + place
    c = tl.load(cos + angle, mask=inside, other=0.0).to(WIDE)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(WIDE)
    if BACK:
        s = -s
    target = 2 * HALF * head + place
    tl.store(y + target, (first * c - second * s).to(y.dtype.element_ty), mask=inside)
    tl.store(y + target + HALF, (second * c + first * s).to(y.dtype.element_ty), mask=inside)


def turned(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Return x [s, b, heads, head size] rotated by the angles with the cosines and sines `cos` and
    `sin`. Both `cos` and `sin` are [s, 1, 1, head size] or, if each sequence has angles of its own,
    [s, b, 1, head size]. They must have the same strides. If `back` is True, rotate by the negative
    angles. The elements of a head must be contiguous in all inputs. The result is contiguous."""
    s, batch, heads, size = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    pairs = heads * size // 2
    block = block_of(pairs, BLOCK)
    with on_device_of(x):
        _turn[(s * batch, -(-pairs // block))](
            x,
            y,
            cos,
            sin,
            batch,
            pairs,
            *x.stride()[:3],
            cos.stride(0),
            cos.stride(1) if cos.shape[1] > 1 else 0,
            HALF=size // 2,
            BACK=back,
            BLOCK=block,
            WIDE=wide(x),
            num_warps=warps_of(block),
        )
    return y
