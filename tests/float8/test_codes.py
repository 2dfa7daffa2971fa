"""Matrices in 8-bit floating point: codes, scales and values are those of a reference in numpy, to
the bit, and each product of a linear uses the operands that the definition says."""

import math
from unittest import mock

import numpy as np
import pytest
import torch

from ptdmpi.config.precision import PRECISIONS
from ptdmpi.model.kernels import Kernels
from ptdmpi.model.kernels.float8 import Float8Kernels
from ptdmpi.model.low_bit import float8
from ptdmpi.model.low_bit.float8 import ALONG_COLUMNS, ALONG_ROWS, OF_WEIGHTS, ScaleTile, scaled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# bits of the exponent and of the mantissa, bias of the exponent, largest number (Micikevicius et
# al. 2022, arXiv 2209.05433, table 1)
FORMATS = {E4M3: (4, 3, 7, 448.0), E5M2: (5, 2, 15, 57344.0)}
TILES = [ALONG_ROWS, ALONG_COLUMNS, OF_WEIGHTS, ScaleTile(3, 5)]
SHAPES = [(2, 256), (130, 128), (128, 384), (5, 32), (131, 200)]


def levels(kind: torch.dtype) -> np.ndarray:
    """Return the numbers of an 8-bit type that are not negative, in the order of their codes."""
    exponent_bits, bits, bias, largest = FORMATS[kind]
    numbers = [m / 2**bits * 2.0 ** (1 - bias) for m in range(2**bits)]
    for e in range(1, 2**exponent_bits):
        numbers += [(1 + m / 2**bits) * 2.0 ** (e - bias) for m in range(2**bits)]
    return np.array([number for number in numbers if number <= largest])


def nearest(x: np.ndarray, kind: torch.dtype) -> np.ndarray:
    """Return the nearest numbers of an 8-bit type; of two, the one with the even code."""
    known = levels(kind)
    after = np.searchsorted(known, np.abs(x)).clip(1, len(known) - 1)
    below, above = np.abs(x) - known[after - 1], known[after] - np.abs(x)
    code = np.where(below < above, after - 1, after)
    code = np.where(below == above, after - after % 2, code)
    return np.sign(x) * known[code]


def exponent(greatest: float, kind: torch.dtype) -> int:
    """Return the largest k, at most 100, with greatest 2^k <= the largest number of the type."""
    k = 100
    while greatest * 2.0**k > FORMATS[kind][3]:
        k -= 1
    return k


def reference(x: torch.Tensor, tile: ScaleTile, kind: torch.dtype) -> np.ndarray:
    """Return the values of a matrix after rounding, tile by tile."""
    wide = x.double().numpy()
    result = np.empty_like(wide)
    for row in range(0, len(wide), tile.rows):
        for column in range(0, wide.shape[1], tile.columns):
            part = np.s_[row : row + tile.rows, column : column + tile.columns]
            power = 2.0 ** exponent(np.abs(wide[part]).max(), kind)
            result[part] = nearest(wide[part] * power, kind) / power
    return result


def matrix(rows: int, columns: int, name: str = "x") -> torch.Tensor:
    """Return numbers of very different magnitudes, with zeros, ties and ends of ranges."""
    draw = torch.Generator().manual_seed(rows + columns + len(name))
    x = torch.randn(rows, columns, generator=draw)
    x *= torch.exp2(torch.randint(-12, 12, (rows, 1), generator=draw).float())
    x[0, :9] = torch.tensor([448.0, 449.0, 17.0, 19.0, -17.0, 2.0**-9, 2.0**-10, 57344.0, 0.0])
    x[-1] = 0.0
    x[1] *= 2.0**-100
    return x.bfloat16()


def wrong(x: torch.Tensor, tile: ScaleTile, kind: torch.dtype) -> str:
    """Return how the codes and values of a matrix differ from the reference."""
    expected = reference(x, tile, kind)
    made = scaled(x, tile, kind)
    if not np.array_equal(made.values(torch.bfloat16).double().numpy(), expected):
        return "values"
    if not torch.equal(made.values(torch.bfloat16).float(), made.values(torch.float32)):
        return "values in bfloat16"
    if made.codes.dtype != kind or made.codes.shape != x.shape:
        return "codes"
    shape = tuple(-(-size // min(side, size)) for size, side in zip(x.shape, tile, strict=True))
    return "" if made.scales.shape == shape else "scales"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile", TILES)
def test_codes_and_scales_are_those_of_the_definition(kind, shape, tile):
    assert wrong(matrix(*shape), tile, kind) == ""


@pytest.mark.parametrize("kind", FORMATS)
def test_exponents_are_the_largest_that_do_not_overflow(kind):
    """Also next to the largest number of the type, for zero and for the smallest numbers."""
    steps = torch.tensor([0, 1, -1])
    known = [1.75, 1.0, 448.0, 3.0e38, 1e-30, 57344.0]
    bits = torch.tensor(known).view(torch.int32)[:, None] + steps
    greatest = torch.cat([bits.view(torch.float32).flatten(), torch.tensor([0.0, 1e-40])])
    expected = [exponent(float(value), kind) for value in greatest]
    assert float8.exponents(greatest, kind).tolist() == expected
    powers = float8.powers(torch.tensor(expected, dtype=torch.int32))
    assert powers.tolist() == [2.0**k for k in expected]


def test_a_wrong_exponent_or_rounding_is_found():
    x, right, powers = matrix(128, 256), float8.exponents, float8.powers
    with mock.patch.object(float8, "exponents", lambda *given: right(*given) - 1):
        assert wrong(x, ALONG_ROWS, E4M3) == "values"  # one bit less for small numbers
    with mock.patch.object(float8, "_ABOVE_MANTISSA", 0):
        assert wrong(x, ALONG_ROWS, E4M3) == "values"  # greatest numbers above 448 are NaN
    with mock.patch.object(float8, "powers", lambda k: powers(k) * 1.02):
        assert wrong(x, ALONG_COLUMNS, E5M2) == "values"


@pytest.mark.parametrize("kind", FORMATS)
def test_numbers_that_are_not_finite_stay_so(kind):
    """A step with such numbers is skipped, so they must not be lost."""
    for bad in (math.inf, -math.inf, math.nan):
        x = matrix(128, 256)
        x[3, 7] = bad
        for tile in (ALONG_ROWS, ALONG_COLUMNS, OF_WEIGHTS):
            assert not float8.rounded(x, tile, kind)[3, 7].isfinite()


@pytest.mark.parametrize("keeps_codes", [True, False])
def test_each_product_uses_the_operands_of_the_definition(keeps_codes):
    """y = x W^T, dx = dy W and dW = dy^T x: the operands that the kernels get, to the bit."""
    x, weight, dy = matrix(192, 256), matrix(384, 256, "weight"), matrix(192, 384, "gradient")
    given = []
    kernels = Float8Kernels(Kernels(precision=PRECISIONS["fp8"]), keeps_codes=keeps_codes)

    def taken(self, *operands):
        given.append(operands)

    def added(self, total, *operands):
        given.append(operands)

    with (
        mock.patch.object(Kernels, "linear", taken),
        mock.patch.object(Kernels, "input_gradient", taken),
        mock.patch.object(Kernels, "add_weight_gradient", added),
    ):
        entered, kept = kernels.entering(x.view(2, 96, 256))
        kernels.linear(entered, weight)
        kernels.input_gradient(dy.view(2, 96, 384), weight)
        again = kernels.entered(kept, torch.bfloat16)
        kernels.add_weight_gradient(torch.zeros(384, 256), dy.view(2, 96, 384), again)
    values = torch.tensor(reference(x, ALONG_ROWS, E4M3)).bfloat16()
    expected = [
        (reference(x, ALONG_ROWS, E4M3), reference(weight, OF_WEIGHTS, E4M3)),
        (reference(dy, ALONG_ROWS, E5M2), reference(weight, OF_WEIGHTS, E4M3)),
        (reference(dy, ALONG_COLUMNS, E5M2), reference(values, ALONG_COLUMNS, E4M3)),
    ]
    for operands, right in zip(given, expected, strict=True):
        for operand, value in zip(operands, right, strict=False):  # after them comes the bias
            assert np.array_equal(operand.double().numpy().reshape(value.shape), value)
    assert [tensor.dtype for tensor in kept] == (
        [E4M3, torch.float32] if keeps_codes else [torch.bfloat16]
    )
