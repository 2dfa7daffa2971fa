"""The lengths of codes (compressed gradients) in bits, as closed formulas. The planner computes the
times of messages from these lengths. For large matrices, the formulas give the mean length over the
steps.

Each compressor divides the elements of a parameter into units of consecutive elements; each unit of
a quantized code has one scale. The last unit of a parameter, or a unit of a bias, may be shorter
than the others.
"""

import math

from ptdmpi.config import DataParallelConfig, ModelConfig
from ptdmpi.config.methods import rounds_of
from ptdmpi.plan.layer.parts import Linear, LowRankPair, Norm, Part, Scale
from ptdmpi.plan.shape.parameters import embedding, head, layer

# SPARSE and QUANTISED are the largest numbers of elements of a unit in sparse codes and in
# quantized codes. With these sizes, an index in a sparse code has 12 bits, and a float32 scale in a
# quantized code adds 1/16 bit per element. The units of QSGD must be small, because the variance of
# QSGD grows with the size of a unit. (Alistarh et al. 2017, section 3.3, also use 512.) For int8
# and int4, the key `block` gives the size of a unit.
SPARSE, QUANTISED = 4096, 512
# Largest number of elements that are encoded at once, unless a single tile has more. A tile
# consists of neighbouring rows or columns of a parameter.
MOST_ELEMENTS = 2**20
# Encoding and decoding need working memory. For each element, this memory holds at most NUMBERS
# floating-point numbers and INTEGERS 64-bit integers. Some kinds of error feedback need additional
# floating-point numbers per element (MORE_NUMBERS). With double_squeeze and neolithic, each tile is
# averaged by one data rank, the server of the tile. The memory of a server is counted as if the
# server averaged all tiles. The values of NUMBERS, INTEGERS and MORE_NUMBERS are measured, and a
# test checks them (`tests/engine/compress/test_scratch.py`).
NUMBERS, INTEGERS = 7, 3
MORE_NUMBERS = {"ef21": 2, "double_squeeze": 6, "neolithic": 9}


def largest_tile(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of elements of the largest tile into which `ptdmpi.engine.compress.units`
    cuts the trained parameters of a model. A tile consists of neighbouring rows or columns of a
    parameter."""
    cut = math.gcd(model.heads, model.ffn_hidden)
    layers = [layer(model, run.kind) for run in model.runs()]
    tables = (*layers, embedding(model, vocab_size), head(model, vocab_size))
    return max(_tile(part, cut) for parts in tables for part in parts.values() if part.trains)


def _tile(part: Part, cut: int) -> int:
    """Return the number of elements of the largest tile into which the weights of `part` (for
    example, of a linear layer) are cut. If possible, the lines (rows or columns) of a weight are
    divided into `cut` = gcd(heads, ffn_hidden) equal slices. Every legal tensor-parallel size
    divides this number, so no layout cuts a tile."""
    if isinstance(part, Norm):
        return part.size
    if isinstance(part, Scale):
        return _lines(part.size, min(cut, part.most or cut))
    if isinstance(part, LowRankPair):
        if part.split == "rows":
            return part.rank * max(_lines(part.inputs, cut), part.outputs)
        return part.rank * max(part.inputs, _lines(part.outputs, min(cut, part.most or cut)))
    if not isinstance(part, Linear):
        return _lines(part.rows, cut if part.split else 1) * part.hidden
    if part.split == "rows":
        return _lines(part.inputs, cut) * sum(part.outputs)
    if part.split is None:
        return part.inputs * sum(part.outputs)
    most = part.most or (cut,) * len(part.outputs)
    shares = zip(part.outputs, most, strict=True)
    return max(_lines(lines, min(cut, limit)) * part.inputs for lines, limit in shares)


def _lines(lines: int, shares: int) -> int:
    """Return the number of consecutive lines (rows or columns of a parameter) that form a tile. If
    the parameter's `lines` lines can be divided into `shares` equal slices, the result is the
    number of lines of a slice. Otherwise the result is 1: for example, the table of a padded
    vocabulary may be cut after any of its lines."""
    if lines % shares:
        return 1
    return lines // shares


def scratch_bytes(
    section: DataParallelConfig, n: int, elements: int, *, tile: int, number_bytes: int
) -> int:
    """Return the most working memory, in bytes, that one of `n` ranks needs to encode and decode
    `elements` elements. `tile` is the number of elements of the largest tile, and `number_bytes`
    the number of bytes of a floating-point number."""
    most = min(elements, max(MOST_ELEMENTS, tile))
    numbers = NUMBERS + MORE_NUMBERS.get(section.error_feedback, 0)
    numbers += 2 if section.method == "decentralized" else 0
    if section.compressor == "power_sgd":
        return most * (numbers + 1) * number_bytes
    code = most * rounds_of(section) * bits_per_element(section, 8 * number_bytes, (1.0, 1.0)) / 8
    return round(most * (numbers * number_bytes + 8 * INTEGERS) + (n + 1) * code)


def bits_per_element(
    section: DataParallelConfig, number_bits: int, tile: tuple[float, float]
) -> float:
    """Return the number of bits per element in the code of a large matrix. `number_bits` is the
    number of bits of an uncompressed number.

    The result counts a single encoding of the matrix. If the length of the code differs between
    steps, the result is the mean over steps. `tile` is the shape (number of lines, length of a
    line) of the tiles that PowerSGD factorizes.
    """
    match section.compressor:
        case "top_k":
            index = 0 if section.ratio == 1.0 else (SPARSE - 1).bit_length()
            return section.ratio * (number_bits + index)
        case "random_k":
            return section.ratio * number_bits
        case "qsgd":
            return (2 * section.levels).bit_length() + number_bits / QUANTISED
        case "sign":
            return 1 + number_bits / QUANTISED
        case "int8" | "int4":
            return int(section.compressor[3:]) + number_bits / section.block
        case "power_sgd":
            lines, length = tile
            return number_bits * min(1.0, section.rank * (1 / lines + 1 / length))
        case _:
            return float(number_bits)
