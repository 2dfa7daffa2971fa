"""Codes as bytes: numbers of a float type in full, and packed ones behind them."""

import torch
from torch import Tensor

# Codes begin and end where a float64 may stand.
GRAIN_BYTES = 8


def join(values: Tensor, packed: Tensor) -> Tensor:
    """[n] numbers of a float type and packed bytes -> one code, uint8, of whole grains."""
    floats = values.contiguous().view(-1).view(torch.uint8)
    length = joined_bytes(len(floats), len(packed))
    code = packed.new_zeros(length)
    code[: len(floats)] = floats
    code[len(floats) : len(floats) + len(packed)] = packed
    return code


def joined_bytes(floats: int, packed: int) -> int:
    """How many bytes `join` makes of so many bytes of floats, and packed ones."""
    return -(-(floats + packed) // GRAIN_BYTES) * GRAIN_BYTES


def part(code: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The `count` floats that a code begins with, and all bytes behind them."""
    size = count * dtype.itemsize
    return code[:size].clone().view(dtype), code[size:]
