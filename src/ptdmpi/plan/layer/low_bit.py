"""The format of quantized matrices (a code for each element, and a float32 scale for each block of
a row), and its sizes in bytes. The module also counts the kernels and the memory that are needed to
round the operands of matrix products to 8-bit floating point. The module does not need torch."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from ptdmpi.base.near import divisors
from ptdmpi.config.choices import CodesName
from ptdmpi.config.model import QuantizeConfig
from ptdmpi.config.precision import FLOAT8_E4M3, SCALED_BLOCK, Scaling
from ptdmpi.plan.layer.account import Item, MemoryPass
from ptdmpi.plan.layer.parts import Linear
from ptdmpi.plan.layer.sizes import Sizes

CODES = get_args(CodesName)
# A CPU dequantizes a matrix in chunks of CHUNK_ELEMENTS elements, with CHUNK_BYTES bytes of working
# memory per element. A GPU dequantizes chunks that are DEVICE_CHUNKS times as large. Smaller chunks
# would fit into the caches of a GPU, but would need more kernel launches, which would cost more
# time than the caches would save.
CHUNK_ELEMENTS, CHUNK_BYTES, DEVICE_CHUNKS = 1 << 18, 24, 16
# Number of kernels that dequantize a chunk: they convert codes to integers, convert integers to
# levels, multiply by the scales, and convert to the compute type.
UNPACKING_KERNELS = 4
SCALE_BYTES = 4  # A scale is float32 in every compute type.
FLOAT8_BYTES = FLOAT8_E4M3.bytes
# A checkpoint stores two tensors for a quantized matrix, of these two kinds (its codes and its
# scales). For any other matrix, it stores one tensor of the kind "weights".
KIND_OF_CODES, KIND_OF_SCALES = "codes", "scales"

# The 16 levels of nf4: quantiles of a normal distribution, including zero. Normally distributed
# weights therefore use each level about equally often (Dettmers et al. 2023, arXiv 2305.14314,
# section 3, appendix E).
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
    """A code format: the number of bits of a code, and the value (level) of each code. The levels
    are ascending and exact in float32.

    `reach` is the level to which the element with the largest magnitude in a block is mapped, or,
    if blocks store a minimum, the level to which the largest element is mapped. `numbers` is the
    number of float32 values that a block stores: 1 (its scale), or 2 (its scale and its minimum).
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

    The value of an element is the level of its code times the scale of its block. In int8 and int4,
    the levels are integers. In int8, the element with the largest magnitude in a block gets the
    level 127 or -127. In int4, this element gets the level -8, so the scale has the sign opposite
    to the element's sign. The levels of nf4 are between -1 and 1. In uint4, the values are relative
    to a minimum, which each block stores in addition to its scale.
    """

    codes: CodesName
    block: int

    @classmethod
    def of(cls, section: QuantizeConfig) -> "LowBit | None":
        """Return the format that the section [quantize] of a configuration sets; None if weights
        are not quantized."""
        if section.weights == "none":
            return None
        return cls(section.weights, section.block)

    @property
    def bits(self) -> int:
        """Return the number of bits of a code."""
        return FORMS[self.codes].bits

    @property
    def levels(self) -> tuple[float, ...]:
        """Return the value of each code, ascending; each is exact in float32."""
        return FORMS[self.codes].levels

    @property
    def numbers(self) -> int:
        """Return the number of float32 values that a block stores: its scale and, for uint4, its
        minimum."""
        return FORMS[self.codes].numbers

    @property
    def reach(self) -> float:
        """Return the level to which the element with the largest magnitude in a block is mapped,
        or, for uint4, the level to which the largest element is mapped."""
        return FORMS[self.codes].reach

    @property
    def middles(self) -> tuple[float, ...]:
        """Return the thresholds between the levels, ascending: the midpoints of neighbouring
        levels."""
        return tuple((low + high) / 2 for low, high in itertools.pairwise(self.levels))

    def code_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the codes of a matrix [rows, columns]: (rows, bytes per row)."""
        return rows, columns * self.bits // 8

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the scales of a matrix [rows, columns]: (rows, n), where n is the
        number of blocks of a row times the number of float32 values that a block stores (see
        `numbers`)."""
        return rows, columns // self.block * self.numbers

    def bytes_of(self, rows: int, columns: int) -> int:
        """Return the bytes of a quantized matrix [rows, columns]: its codes and its scales."""
        scales = math.prod(self.scale_shape(rows, columns)) * SCALE_BYTES
        return rows * columns * self.bits // 8 + scales

    @property
    def bits_per_element(self) -> float:
        """Return the bits per element of a large matrix, including its scales."""
        return self.bits + 8 * SCALE_BYTES * self.numbers / self.block


def chunk_elements(on_host: bool) -> int:
    """Return the number of elements of a matrix that are dequantized at once: on a CPU if `on_host`
    is True, otherwise on a GPU."""
    if on_host:
        return CHUNK_ELEMENTS
    return CHUNK_ELEMENTS * DEVICE_CHUNKS


def unpacking(
    form: LowBit, shape: tuple[int, int], compute_bytes: int, on_host: bool
) -> tuple[float, int]:
    """Return (bytes moved, number of kernels) for dequantizing a matrix with `shape` = (inputs,
    outputs) once, as `ptdmpi.model.low_bit` does.

    The dequantization has four passes over the matrix, or five if blocks have a minimum. The first
    pass reads codes and writes them as integers of four bytes. The second pass reads the integers
    and writes levels. The third pass reads levels and writes their products with the scales. If
    blocks have a minimum, another pass adds it to the products. The last pass reads the products
    and writes them in the compute type.
    """
    inputs, outputs = shape
    added = form.numbers - 1
    each = form.bits / 8 * (1 + 4 + 4) + (4 + 2 * added) * 4 + compute_bytes
    at_once = max(1, chunk_elements(on_host) // inputs)
    chunks = -(-outputs // at_once)
    return inputs * outputs * each, (UNPACKING_KERNELS + added) * chunks


# -- products in 8-bit floating point -------------------------------------------------------------


def encoding(elements: int, element_bytes: int, scaling: Scaling) -> MemoryPass:
    """Return the kernels that compute the codes of a matrix of `elements` elements. The first finds
    the largest magnitude of each tile of the matrix, the second multiplies the matrix by the
    scales, and the third converts the products to codes. With delayed scales, another kernel clamps
    the products in place."""
    if scaling == "delayed":
        return MemoryPass(elements * (6 * element_bytes + FLOAT8_BYTES), 4)
    return MemoryPass(elements * (4 * element_bytes + FLOAT8_BYTES), 3)


def decoding(elements: int, element_bytes: int) -> MemoryPass:
    """Return the kernels that compute the values of `elements` codes: one converts the codes, and
    one multiplies the result by the scales in place."""
    return MemoryPass(elements * (FLOAT8_BYTES + 3 * element_bytes), 2)


def rounding(elements: int, element_bytes: int, scaling: Scaling) -> MemoryPass:
    """Return the kernels that round a matrix of `elements` elements: they compute its codes, and
    then the values of the codes."""
    made, read = encoding(elements, element_bytes, scaling), decoding(elements, element_bytes)
    return MemoryPass(made.moved_bytes + read.moved_bytes, made.launches + read.launches)


def codes_of_rows(name: str, rows: int, columns: int, scaling: Scaling) -> Iterator[Item]:
    """Yield the codes of a matrix [rows, columns] and, if there is a scale for each block of a row
    (`scaling` "block"), the scales."""
    yield Item(name, rows * columns, FLOAT8_BYTES)
    if scaling == "block":
        yield Item(name, rows * -(-columns // SCALED_BLOCK), SCALE_BYTES)


def peak_bytes(elements: int, element_bytes: int) -> int:
    """Return the bytes of two tensors of `elements` elements: the codes of a matrix, and the scaled
    matrix from which the codes are computed (or, after decoding, the values of the codes)."""
    return elements * (FLOAT8_BYTES + element_bytes)


def scaled_forward_bytes(sizes: Sizes, shape: tuple[int, int], rows: int, copies: int) -> int:
    """Return the working bytes of the forward of a linear layer with `shape` = (inputs, outputs)
    whose matrix products are in 8-bit floating point. Memory holds the input and the rounded input.
    In addition, memory holds either the weight while it is rounded, or the rounded weight, the
    output and `copies` bytes of copies for the matrix product."""
    inputs, outputs = shape
    c, weights = sizes.compute_bytes, inputs * outputs
    product = weights * c + rows * outputs * c + copies
    return 2 * rows * inputs * c + max(peak_bytes(weights, c), product)


def scaled_backward_bytes(
    sizes: Sizes,
    shape: tuple[int, int],
    rows: int,
    *,
    keeps_codes: bool,
    input_first: bool = False,
) -> int:
    """Return the working bytes of the backward of a linear layer with `shape` = (inputs, outputs)
    whose matrix products are in 8-bit floating point. `keeps_codes` is True if the forward kept the
    8-bit codes of the input instead of the input. If `input_first` is True, the gradient of the
    input is computed before the gradient of the weight, and stays in memory."""
    inputs, outputs = shape
    c = sizes.compute_bytes
    gradient, weights = rows * inputs * c, inputs * outputs
    copies = 0
    if sizes.operand_bytes > c:
        copies = (rows * (inputs + outputs) + weights) * sizes.operand_bytes
    product = max(peak_bytes(weights, c), weights * c + gradient + copies)
    first = max(peak_bytes(rows * outputs, c), rows * outputs * c + product)
    adding = scaled_adding_bytes(sizes, shape, rows, keeps_codes=keeps_codes)
    return max(first, adding + gradient * input_first)


def scaled_adding_bytes(
    sizes: Sizes, shape: tuple[int, int], rows: int, *, keeps_codes: bool
) -> int:
    """Return the working bytes of the matrix product that computes the gradient of a weight with
    `shape` = (inputs, outputs). The operands are the input and the gradient of the output. The
    result counts the input (decoded from its 8-bit codes), both operands after they are rounded to
    8-bit floating point, and the product. With delayed scales, an input that is decoded from kept
    codes is not rounded again. `keeps_codes` is True if the forward kept these codes instead of the
    input."""
    inputs, outputs = shape
    c = sizes.compute_bytes
    values = rows * inputs * c
    product = inputs * outputs * (c + sizes.wide_bytes)
    if sizes.operand_bytes > c:
        product = rows * (inputs + outputs) * sizes.operand_bytes
    again, first = 2 * values, values + peak_bytes(rows * inputs, c)
    if sizes.model.scaling == "delayed":
        again, first = values, values if keeps_codes else peak_bytes(rows * inputs, c)
    second = peak_bytes(rows * outputs, c)
    return max(first, again + max(second, rows * outputs * c + product))


def cuts_blocks(linear: Linear, tensor: int) -> str | None:
    """Return the reason why `tensor` tensor-parallel ranks cannot divide a linear layer in which
    blocks of weights share a scale. Return None if no block would be cut. (The scales of cut blocks
    would depend on the layout.)"""
    legal = [size for size in divisors(tensor) if _whole_blocks(linear, size)]
    if tensor in legal:
        return None
    return (
        f'precision.compute = "fp8": parallel.tensor = {tensor} cuts blocks of {SCALED_BLOCK} x '
        f"{SCALED_BLOCK} weights that share a scale; legal nearby: tensor {legal[-1]}"
    )


def _whole_blocks(linear: Linear, tensor: int) -> bool:
    """Return True if the slices of a linear layer on `tensor` tensor-parallel ranks consist of
    whole blocks."""
    if tensor == 1 or linear.split is None:
        return True
    parts = (linear.inputs,) if linear.split == "rows" else linear.outputs
    most = linear.most or (tensor,) * len(parts)
    shares = [min(tensor, limit) for limit in most]
    return not any(part % (n * SCALED_BLOCK) for part, n in zip(parts, shares, strict=True))
