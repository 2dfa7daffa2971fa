"""The byte format of codes: first some numbers of a float type, then packed integers."""

import torch
from torch import Tensor

# A code (the compressed form of a tensor) is padded to a multiple of this number of bytes, which is
# the alignment of float64.
GRAIN_BYTES = 8


def join(values: Tensor, packed: Tensor) -> Tensor:
    """Join `values`, [n] numbers of a float type, and the bytes `packed` into one code. The code is
    a uint8 tensor, padded to a multiple of GRAIN_BYTES."""
    floats = values.contiguous().view(-1).view(torch.uint8)
    length = joined_bytes(len(floats), len(packed))
    code = packed.new_zeros(length)
    code[: len(floats)] = floats
    code[len(floats) : len(floats) + len(packed)] = packed
    return code


def joined_bytes(floats: int, packed: int) -> int:
    """Return the length in bytes of the code that `join` makes from `floats` bytes of float numbers
    and `packed` packed bytes."""
    return -(-(floats + packed) // GRAIN_BYTES) * GRAIN_BYTES


def part(code: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split a code that `join` has made. Return its first `count` numbers, which have the float
    type `dtype`, and all bytes that follow them."""
    size = count * dtype.itemsize
    return code[:size].clone().view(dtype), code[size:]
