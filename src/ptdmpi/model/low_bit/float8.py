"""Matrices in 8-bit floating point with one scale for each tile. They are the operands of matrix
products in the precision fp8.

A matrix [m, n] is cut into tiles of p x q elements; tiles at the end may be smaller. The elements
of a tile share a scale 2^-k. The code of an element x is x 2^k, rounded to the nearest number of
the 8-bit type (to even if two are equally near). The value of a code c is c 2^-k. The exponent k is
the largest whole number, at most 100, for which the greatest magnitude of the tile times 2^k is at
most the largest number of the type.

Scales are powers of two, as in Transformer Engine's recipe for blocks, so a value is exact in
bfloat16. If values are multiplied in bfloat16 with sums in float32, the result is therefore the
product of the codes, up to the order of the additions.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ptdmpi.config.precision import SCALED_BLOCK

# The largest exponent k. A tile that contains only zeros has this k. Even with this k, the value of
# every code except 0 is a normal number in bfloat16.
MOST_EXPONENT = 100
# The largest number of both 8-bit types has the mantissa 1.75. If this constant is added to the
# bits of a float32 number, the addition carries into the exponent if and only if the mantissa is
# greater than 1.75.
_ABOVE_MANTISSA = 0x7FFFFF - 0x600000


class ScaleTile(NamedTuple):
    """The size of a tile, a rectangle of a matrix whose elements share a scale: its numbers of rows
    and columns."""

    rows: int
    columns: int


# The shapes of tiles (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2). An operand [rows,
# columns] has tiles along its rows if the product sums over columns, and along its columns if the
# product sums over rows. Weights have square tiles.
ALONG_ROWS = ScaleTile(1, SCALED_BLOCK)
ALONG_COLUMNS = ScaleTile(SCALED_BLOCK, 1)
OF_WEIGHTS = ScaleTile(SCALED_BLOCK, SCALED_BLOCK)


@dataclass(frozen=True)
class Scaled:
    """A matrix [m, n] in 8-bit floating point: the codes [m, n], the scales 2^-k of its tiles, and
    the tile (p, q). The scales are float32 [m / p, n / q], with both quotients rounded up."""

    codes: Tensor
    scales: Tensor
    tile: ScaleTile

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values [m, n] of the codes in `dtype`, which is bfloat16 or wider."""
        values = _tiles(self.codes.to(dtype), self.tile)
        values *= self.scales.to(dtype)[:, None, :, None]
        return _untiled(values, self.codes.shape)


def exponents(greatest: Tensor, kind: torch.dtype) -> Tensor:
    """Return the exponents k, int32, for the greatest magnitudes of tiles. `kind` is the 8-bit
    type. The result is computed from the bits of the numbers, so it is exact."""
    top = int(math.log2(torch.finfo(kind).max))
    bits = greatest.float().view(torch.int32)
    return (127 + top - (bits + _ABOVE_MANTISSA >> 23)).clamp_(max=MOST_EXPONENT)


def powers(exponent: Tensor) -> Tensor:
    """Return 2^k, float32, for exponents k, int32. Each 2^k must be a normal float32 number."""
    return (exponent + 127 << 23).view(torch.float32)


def scaled(x: Tensor, tile: ScaleTile, kind: torch.dtype) -> Scaled:
    """Return a matrix [m, n] of bfloat16 or wider numbers in the 8-bit type `kind`. If a tile has
    an infinity or a NaN, at least one value of its codes is not finite."""
    tiles = _tiles(x, tile)
    greatest = torch.linalg.vector_norm(tiles, math.inf, dim=(1, 3))
    exponent = exponents(greatest, kind)
    codes = (tiles * powers(exponent).to(x.dtype)[:, None, :, None]).to(kind)
    return Scaled(_untiled(codes, x.shape), powers(-exponent), tile)


def rounded(x: Tensor, tile: ScaleTile, kind: torch.dtype) -> Tensor:
    """Return the values of a matrix x [m, n] after rounding to the 8-bit type `kind` with one scale
    for each tile, in the type of x."""
    return scaled(x, tile, kind).values(x.dtype)


def _tiles(x: Tensor, tile: ScaleTile) -> Tensor:
    """Return a matrix [m, n] in the shape [m / p, p, n / q, q]. If p does not divide m, or q does
    not divide n, the matrix is padded with zeros at its end. A matrix that is smaller than a tile
    is one tile."""
    sides = [min(side, size) for side, size in zip(tile, x.shape, strict=True)]
    below, after = (-size % side for size, side in zip(x.shape, sides, strict=True))
    if below or after:
        x = F.pad(x, (0, after, 0, below))
    return x.unflatten(1, (-1, sides[1])).unflatten(0, (-1, sides[0]))


def _untiled(tiles: Tensor, shape: torch.Size) -> Tensor:
    """Return the matrix of the given shape [m, n] whose tiles are [m / p, p, n / q, q]."""
    whole = tiles.flatten(2).flatten(0, 1)
    return whole[: shape[0], : shape[1]].contiguous()
