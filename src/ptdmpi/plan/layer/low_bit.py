"""The format of quantized matrices: a code for each element, a float32 scale for each block of a
row, the values of the codes, and the sizes in bytes. This module does not need torch."""

import itertools
import math
from dataclasses import dataclass
from typing import get_args

from ptdmpi.config.choices import CodesName
from ptdmpi.config.model import QuantizeConfig

CODES = get_args(CodesName)
# A host dequantizes a matrix in chunks of CHUNK_ELEMENTS elements, with CHUNK_BYTES bytes of
# working memory per element. Other devices dequantize chunks that are DEVICE_CHUNKS times as large,
# because launching more kernels would cost more time than a better use of caches would save.
CHUNK_ELEMENTS, CHUNK_BYTES, DEVICE_CHUNKS = 1 << 18, 24, 16
# Number of kernels that dequantize a chunk: they convert codes to integers, convert integers to
# levels, multiply by the scales, and convert to the compute type.
UNPACKING_KERNELS = 4
SCALE_BYTES = 4  # A scale is float32, whatever the compute type is.
# Kinds of the two tensors of a quantized matrix in files. Both kinds replace the kind "weights".
KIND_OF_CODES, KIND_OF_SCALES = "codes", "scales"

# The 16 levels of nf4: quantiles of a normal distribution, half of them for each sign, with zero as
# one of them. Normally distributed weights therefore use each level about equally often (Dettmers
# et al. 2023, arXiv 2305.14314, section 3, appendix E).
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
class Codes:
    """A kind of codes: the number of `bits` of a code, and the `levels` of the codes, ascending and
    exact in float32.

    `reach` is the level to which the largest magnitude of a block is mapped; if blocks store a
    minimum, it is the level to which the largest value of a block is mapped. `numbers` is the
    number of float32 values of a block: 1 for its scale, or 2 for its scale and its minimum.
    """

    bits: int
    levels: tuple[float, ...]
    reach: float
    numbers: int = 1


def _integers(first: int, bits: int) -> tuple[float, ...]:
    return tuple(float(level) for level in range(first, first + 2**bits))


FORMS: dict[CodesName, Codes] = {
    "int8": Codes(8, _integers(-128, 8), reach=127.0),
    "int4": Codes(4, _integers(-8, 4), reach=-8.0),
    "nf4": Codes(4, NF4, reach=1.0),
    "uint4": Codes(4, _integers(0, 4), reach=15.0, numbers=2),
}


@dataclass(frozen=True)
class LowBit:
    """The format of a quantized matrix [o, i]: a code for each element, and a scale for each block
    of `block` elements of a row (o outputs, i inputs).

    The value of an element is the level of its code times the scale of its block. The levels of
    int8 and int4 are integers; the element with the largest magnitude in a block gets the level 127
    or -127 (int8), or -8 (int4, whose scale has the sign that this requires). The levels of nf4 are
    between -1 and 1. The values of uint4 are relative to a minimum, which each block stores in
    addition to its scale.
    """

    codes: CodesName
    block: int

    @classmethod
    def of(cls, section: QuantizeConfig) -> "LowBit | None":
        """Return the format that the configuration sets; None if weights are not quantized."""
        if section.weights == "none":
            return None
        return cls(section.weights, section.block)

    @property
    def bits(self) -> int:
        """Return the bits of a code."""
        return FORMS[self.codes].bits

    @property
    def levels(self) -> tuple[float, ...]:
        """Return the value of each code, ascending; each is exact in float32."""
        return FORMS[self.codes].levels

    @property
    def numbers(self) -> int:
        """Return the number of float32 values of a block: its scale and, for uint4, its minimum."""
        return FORMS[self.codes].numbers

    @property
    def reach(self) -> float:
        """Return the level to which the largest magnitude of a block is mapped; for uint4, the
        level to which the largest value is mapped."""
        return FORMS[self.codes].reach

    @property
    def middles(self) -> tuple[float, ...]:
        """Return the thresholds halfway between neighbouring levels, ascending. The number of
        thresholds is the number of levels minus 1."""
        return tuple((low + high) / 2 for low, high in itertools.pairwise(self.levels))

    def code_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the codes of a matrix, (rows, bytes per row)."""
        return rows, columns * self.bits // 8

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the scales of a matrix: (rows, n), in which n is the number of
        blocks of a row times the float32 values that are stored for a block: its scale, and in
        some formats also its minimum."""
        return rows, columns // self.block * self.numbers

    def bytes_of(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix: its codes and its scales."""
        scales = math.prod(self.scale_shape(rows, columns)) * SCALE_BYTES
        return rows * columns * self.bits // 8 + scales

    @property
    def bits_per_element(self) -> float:
        """Return the bits per element of a large matrix, including its scales."""
        return self.bits + 8 * SCALE_BYTES * self.numbers / self.block


def chunk_elements(on_host: bool) -> int:
    """Return the number of elements of a matrix that a device dequantizes at once."""
    if on_host:
        return CHUNK_ELEMENTS
    return CHUNK_ELEMENTS * DEVICE_CHUNKS


def unpacking(
    form: LowBit, shape: tuple[int, int], compute_bytes: int, on_host: bool
) -> tuple[float, int]:
    """Return (bytes moved, number of kernels) for dequantizing a matrix with `shape` = (inputs,
    outputs) once, as `ptdmpi.model.low_bit` does.

    The dequantization has four passes over the matrix, and a fifth one for codes with a minimum.
    The first pass reads codes and writes them as integers of four bytes. The second pass reads the
    integers and writes levels. The third pass reads levels and writes the products of levels and
    scales. If there is a minimum, another pass reads and writes the products. The last pass reads
    the products and writes them in the compute type.
    """
    inputs, outputs = shape
    added = form.numbers - 1
    each = form.bits / 8 * (1 + 4 + 4) + (4 + 2 * added) * 4 + compute_bytes
    at_once = max(1, chunk_elements(on_host) // inputs)
    chunks = -(-outputs // at_once)
    return inputs * outputs * each, (UNPACKING_KERNELS + added) * chunks
