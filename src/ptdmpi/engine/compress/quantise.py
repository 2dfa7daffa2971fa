"""Quantizing compressors: for each compression block (a part of a parameter) they send one scale,
and for each element a code of a few bits."""

import math
from abc import abstractmethod

import torch
from torch import Tensor

from ptdmpi.engine.compress.compressor import Compressor, Draws
from ptdmpi.engine.compress.packing import join, joined_bytes, part
from ptdmpi.model.low_bit.packing import pack, packed_bytes, unpack
from ptdmpi.plan.shape.codes import QUANTISED


class Quantiser(Compressor):
    """A compressor that sends a scale for each block, in the type of the gradients, and `bits` bits
    for each element."""

    def __init__(self, longest: int, bits: int) -> None:
        super().__init__(longest)
        self.bits = bits

    @abstractmethod
    def scales(self, x: Tensor) -> Tensor:
        """Return the scales [n, 1] of x [n, length]."""

    @abstractmethod
    def codes(self, x: Tensor, scales: Tensor, draws: Draws) -> Tensor:
        """Return the codes [n, length] of x [n, length]: integers in [0, 2^bits), in any data
        type."""

    @abstractmethod
    def values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Decode `codes` [n, length] int64. Return the values [n, length], in the data type of the
        scales."""

    def code_bytes(self, draws: Draws, length: int, dtype: torch.dtype) -> int:
        """Return the length in bytes of the code for the blocks in `draws`. Each block has `length`
        numbers."""
        n = len(draws.units)
        return joined_bytes(n * dtype.itemsize, packed_bytes(n * length, self.bits))

    def encode(self, x: Tensor, draws: Draws) -> Tensor:
        """Encode x [n, length] as [code_bytes] uint8: first the scales, then the packed codes."""
        scales = self.scales(x)
        codes = self.codes(x, scales, draws).to(torch.int64)
        return join(scales, pack(codes.view(-1), self.bits))

    def decode(self, code: Tensor, draws: Draws, length: int, dtype: torch.dtype) -> Tensor:
        """Return the decoded values, [n, length], of a code that `encode` has returned."""
        n = len(draws.units)
        scales, rest = part(code, n, dtype)
        codes = unpack(rest[: packed_bytes(n * length, self.bits)], n * length, self.bits)
        return self.values(codes.view(n, length), scales[:, None])


class Qsgd(Quantiser):
    """A compressor that rounds each element randomly up or down to a multiple of (the block's norm
    / `levels`), so that the expected value is exact (Alistarh et al. 2017, arXiv 1610.02132,
    section 3.1). For s `levels` and blocks of d elements, omega = min(d / s^2, sqrt(d) / s).

    Each element takes ceil(log2(2 s + 1)) bits. If not `unbiased`, every value is divided by 1 +
    omega, so that the compressor contracts, with delta = 1 / (1 + omega). The random numbers have
    24 bits, so the expected value of an element is wrong by at most 2^-24 times the distance
    between two neighbouring multiples.
    """

    def __init__(self, levels: int, unbiased: bool) -> None:
        super().__init__(QUANTISED, (2 * levels).bit_length())
        self.levels = levels
        self.unbiased = unbiased

    def scales(self, x: Tensor) -> Tensor:
        # compute the norm in float64, because squares of large numbers overflow float32
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float64)
        return norm.to(x.dtype)

    def codes(self, x: Tensor, scales: Tensor, draws: Draws) -> Tensor:
        share = torch.where(scales > 0, x.abs() / scales, 0.0).clamp_(max=1.0) * self.levels
        low = share.floor()
        level = low + (draws.uniform(x.shape[1], x.dtype) < share - low)
        return level.copysign(x) + self.levels

    def values(self, codes: Tensor, scales: Tensor) -> Tensor:
        parts = (codes - self.levels).to(scales.dtype) / self.levels
        if self.unbiased:
            return parts * scales
        return parts * scales / (1.0 + self.omega(codes.shape[1]))

    def omega(self, length: int) -> float:
        """Return omega, the bound of the relative variance (see `Compressor`), for blocks of
        `length` elements."""
        return min(length / self.levels**2, math.sqrt(length) / self.levels)

    def delta(self, length: int) -> float:
        """Return delta, the guaranteed contraction (see `Compressor`), for blocks of `length`
        elements."""
        omega = self.omega(length)
        if self.unbiased:
            return max(0.0, 1.0 - omega)
        return 1.0 / (1.0 + omega)


class Sign(Quantiser):
    """A compressor that sends the sign of each element, and the mean magnitude of each block
    (Karimireddy et al. 2019, arXiv 1901.09847, lemma 8). For blocks of d elements ||C(x) - x||^2 =
    ||x||^2 - ||x||_1^2 / d, so delta >= 1 / d."""

    def __init__(self) -> None:
        super().__init__(QUANTISED, 1)

    def scales(self, x: Tensor) -> Tensor:
        return x.abs().mean(dim=1, keepdim=True, dtype=torch.float64).to(x.dtype)

    def codes(self, x: Tensor, scales: Tensor, draws: Draws) -> Tensor:
        return x >= 0

    def values(self, codes: Tensor, scales: Tensor) -> Tensor:
        return torch.where(codes > 0, scales, -scales)

    def delta(self, length: int) -> float:
        """Return delta, the guaranteed contraction (see `Compressor`), for blocks of `length`
        elements."""
        return 1.0 / length


class Rounded(Quantiser):
    """A compressor that rounds each element to the nearest of 2 q + 1 levels: the multiples of (the
    block's greatest magnitude / q) from -q to q. The number q is 127 for int8, and 7 for int4. Each
    block has its own scale.

    The element of greatest magnitude is exact. The error of any other element is at most half the
    distance of two neighbouring multiples, and at most the magnitude of the element. From these
    bounds it follows for blocks of d elements that delta = 4 q^2 / (4 q^2 + d - 1). No greater
    delta is possible: the error reaches the bound if all elements except the greatest one are half
    of the smallest positive multiple.
    """

    def __init__(self, bits: int, block: int) -> None:
        super().__init__(block, bits)
        self.greatest = 2 ** (bits - 1) - 1

    def scales(self, x: Tensor) -> Tensor:
        return x.abs().amax(dim=1, keepdim=True)

    def codes(self, x: Tensor, scales: Tensor, draws: Draws) -> Tensor:
        share = torch.where(scales > 0, x / scales, 0.0)
        return (share * self.greatest).round_() + self.greatest

    def values(self, codes: Tensor, scales: Tensor) -> Tensor:
        return (codes - self.greatest).to(scales.dtype) / self.greatest * scales

    def delta(self, length: int) -> float:
        """Return delta, the guaranteed contraction (see `Compressor`), for blocks of `length`
        elements."""
        square = 4.0 * self.greatest**2
        return square / (square + length - 1)
