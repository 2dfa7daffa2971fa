"""Tensors in 8-bit floating point with one scale for the whole tensor. The scale is chosen before
the step (`precision.fp8 = "delayed"`).

The code of an element x is x 2^k, limited to the largest number of the 8-bit type, and rounded to
the nearest number of the type. The value of a code is the code times 2^-k. The exponent k is
computed from the last `HISTORY` steps. In each step, the greatest magnitude of the tensor over all
ranks and microbatches determines an exponent (`float8.exponents`). The exponent k is the least of
them, as in the recipe of delayed scaling in NVIDIA's Transformer Engine. In a later step, a number
may be too large for this scale, so codes are limited to the largest number of the type.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from ptdmpi.model.low_bit.float8 import MOST_EXPONENT

HISTORY = 16  # the number of steps whose greatest magnitudes determine a scale
# The operands of a linear: y = x W^T reads the input x and the weight W, and the backward also
# reads the gradient dy of the output.
Operand = Literal["input", "weight", "gradient"]
OPERANDS: tuple[Operand, ...] = ("input", "weight", "gradient")


class DelayedScales:
    """The scales of one linear in the present step. `exponents` has the exponent k of each operand
    whose magnitudes in earlier steps are known; the scale of such an operand is 2^-k. `seen` has,
    for each operand, the greatest magnitude in this step so far, as a tensor without dims on the
    operand's device."""

    def __init__(self) -> None:
        self.exponents: Mapping[Operand, int] = {}
        self.seen: dict[Operand, Tensor] = {}

    def begin(self, exponents: Mapping[Operand, int]) -> None:
        """Begin a step: store the exponents of its scales, and discard the magnitudes of the
        previous step."""
        self.exponents, self.seen = exponents, {}

    def saw(self, operand: Operand, x: Tensor) -> Tensor:
        """Return the greatest magnitude of the tensor x, and include it in `seen` for `operand`.
        The result is not finite if an element of x is not finite."""
        greatest = torch.linalg.vector_norm(x, math.inf)
        before = self.seen.get(operand)
        self.seen[operand] = greatest if before is None else torch.maximum(before, greatest)
        return greatest


def encoded(x: Tensor, exponent: int, kind: torch.dtype, greatest: Tensor) -> Tensor:
    """Return the codes of x in the 8-bit type `kind`, with the scale 2^-exponent. `greatest` is the
    greatest magnitude of x. If `greatest` is not finite, all codes are NaN, which makes the run
    skip the step."""
    most = torch.finfo(kind).max
    factor = 2.0**exponent + 0.0 * greatest  # 0 times infinity is NaN
    return (x * factor).clamp_(-most, most).to(kind)


def decoded(codes: Tensor, exponent: int, dtype: torch.dtype) -> Tensor:
    """Return the values of codes with the scale 2^-exponent in `dtype`, which is bfloat16 or wider.
    The values are exact."""
    values = codes.to(dtype)
    values *= 2.0**-exponent
    return values


def chosen(history: Sequence[int]) -> int:
    """Return the exponent of the next step's scale: the least exponent in `history`, which has the
    exponents of earlier steps."""
    return min(history)


def extended(history: Sequence[int], exponent: int) -> tuple[int, ...]:
    """Return `history`, which has the exponents of the last steps, with the exponent of one more
    step at its end. If all numbers of the tensor were zero in this step, the exponent is not added,
    because zeros need no particular scale."""
    if exponent >= MOST_EXPONENT:
        return tuple(history)
    return (*history, exponent)[-HISTORY:]
