"""Functions with which all kernels in Triton are launched: block sizes, number of warps, type of
the computation and device."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def block_of(elements: int, most: int | None = None) -> int:
    """Return the number of elements of a row that a program computes at once: the least power of
    two that is not less than `elements`, but at most `most`. Triton needs powers of two, so `most`
    must be a power of two, too."""
    block = int(triton.next_power_of_2(elements))
    return block if most is None else min(most, block)


def warps_of(block: int) -> int:
    """Return the number of warps (of 32 threads each) for a block of `block` elements."""
    return min(16, max(1, block // 256))


def wide(x: Tensor) -> Any:
    """Return the type (a type of Triton) in which a kernel computes if its operands have the type
    of x: float64 for float64, float32 for all other types."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on the device of x. Triton itself launches on
    the current device of the process."""
    if x.device.type == "cpu":
        return nullcontext()
    return torch.get_device_module(x.device).device(x.device)
