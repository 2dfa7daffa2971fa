"""Matrices in few bits: each row in blocks, of each block one scale in full and a code of every
element. What codes stand for, and how many bytes they take; without torch."""

import itertools
import math
from dataclasses import dataclass
from typing import get_args

from ptdmpi.config.choices import CodesName
from ptdmpi.config.model import QuantizeConfig

CODES = get_args(CodesName)
# Who works on a matrix does so on so many elements at once, with so many bytes of each beside; a
# device that is not the host, whose launches cost more than its cache saves, on more.
CHUNK_ELEMENTS, CHUNK_BYTES, DEVICE_CHUNKS = 1 << 18, 24, 16
# Kernels that make the values of such a chunk: integers of bytes, levels, products, their type.
UNPACKING_KERNELS = 4
SCALE_BYTES = 4  # float32, whatever the compute type is
# What the two parts of a matrix are called in files, in the place of its weights.
KIND_OF_CODES, KIND_OF_SCALES = "codes", "scales"

# Quantiles of a normal distribution, half of them for each sign, so that each of the 16 is met
# equally often, zero among them (Dettmers et al. 2023, arXiv 2305.14314, section 3, appendix E).
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True)
class LowBit:
    """A matrix [o, i] in few bits: `codes` of its elements, and a scale of each `block` of a row.

    An element is its code's level times the scale of its block. Levels of int8 and int4 are whole
    numbers; the greatest magnitude of a block is 127 of int8 and, by the sign of the scale, -8 of
    int4 (absmax). Those of nf4 lie between -1 and 1. Those of uint4 count from a least value, which
    each block has beside its scale.
    """

    codes: CodesName
    block: int

    @classmethod
    def of(cls, section: QuantizeConfig) -> "LowBit | None":
        """What a run asks for; None: its products take weights as they are."""
        return None if section.weights == "none" else cls(section.weights, section.block)

    @property
    def bits(self) -> int:
        """How many a code has."""
        return 8 if self.codes == "int8" else 4

    @property
    def levels(self) -> tuple[float, ...]:
        """What each code stands for, ascending; a float32 holds them exactly."""
        if self.codes == "nf4":
            return NF4
        first = 0 if self.codes == "uint4" else -(2 ** (self.bits - 1))
        return tuple(float(level) for level in range(first, first + 2**self.bits))

    @property
    def numbers(self) -> int:
        """How many float32 a block has: its scale, and of uint4 the least value behind it."""
        return 2 if self.codes == "uint4" else 1

    @property
    def reach(self) -> float:
        """The level of a block's greatest magnitude; of uint4, of its greatest value."""
        return self.levels[0 if self.codes == "int4" else -1]

    @property
    def middles(self) -> tuple[float, ...]:
        """Between which two levels values change from one to the next: ascending, one fewer."""
        return tuple((low + high) / 2 for low, high in itertools.pairwise(self.levels))

    def code_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The bytes of a matrix's codes, row by row."""
        return rows, columns * self.bits // 8

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The scales of a matrix, a block's `numbers` side by side."""
        return rows, columns // self.block * self.numbers

    def bytes_of(self, rows: int, columns: int) -> int:
        """Bytes of a matrix: its codes and its scales."""
        scales = math.prod(self.scale_shape(rows, columns)) * SCALE_BYTES
        return rows * columns * self.bits // 8 + scales

    @property
    def bits_per_element(self) -> float:
        """How many an element of a large matrix takes, scales included."""
        return self.bits + 8 * SCALE_BYTES * self.numbers / self.block


def chunk_elements(on_host: bool) -> int:
    """On how many elements of a matrix a device works at once."""
    return CHUNK_ELEMENTS * (1 if on_host else DEVICE_CHUNKS)


def unpacking(
    form: LowBit, shape: tuple[int, int], compute_bytes: int, on_host: bool
) -> tuple[float, int]:
    """Return (bytes that are moved, kernels) when the values of a matrix of (inputs, outputs) are
    made once, as `ptdmpi.model.low_bit` does.

    Codes are read and written as four bytes, these read and levels written, read and products
    written, these with the least value, where there is one, once more, read and written in the
    compute type.
    """
    inputs, outputs = shape
    added = form.numbers - 1
    each = form.bits / 8 * (1 + 4 + 4) + (4 + 2 * added) * 4 + compute_bytes
    at_once = max(1, chunk_elements(on_host) // inputs)
    chunks = -(-outputs // at_once)
    return inputs * outputs * each, (UNPACKING_KERNELS + added) * chunks
