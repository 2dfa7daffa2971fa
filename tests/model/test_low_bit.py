"""Codes of blocks: packed, unpacked and rounded on the way are the same numbers, in torch and in a
file; what is known of their errors holds."""

import numpy as np
import pytest
import torch

from ptdmpi.checkpoint.boxes import _levels
from ptdmpi.model.low_bit.codes import codes_of, packed, rounded, scales_of
from ptdmpi.plan.layer.low_bit import CODES, LowBit


def matrix(rows: int = 24, columns: int = 96) -> torch.Tensor:
    found = torch.randn(rows, columns, generator=torch.Generator().manual_seed(5))
    found[3, 32:64] = 0.0
    return found


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packed_values_are_those_that_rounding_on_the_way_gives(codes, dtype):
    form, x = LowBit(codes, 32), matrix().to(dtype)
    held = packed(x, form)
    assert torch.equal(held.values(dtype), rounded(x, form))
    assert held.nbytes == form.bytes_of(*x.shape)
    assert held.codes.shape == form.code_shape(*x.shape)
    assert (held.values(dtype)[3, 32:64] == 0).all()


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_type_is_rounded_as_the_same_numbers_in_float32(codes, dtype):
    """Scales, too: of int8 they are quotients that a half type does not hold."""
    form, x = LowBit(codes, 32), matrix().to(dtype)
    assert torch.equal(scales_of(x, form), scales_of(x.float(), form))
    assert torch.equal(rounded(x, form), rounded(x.float(), form).to(dtype))


@pytest.mark.parametrize("codes", CODES)
def test_a_file_s_reader_has_the_same_levels(codes):
    form = LowBit(codes, 32)
    held = packed(matrix(), form)
    levels = _levels(form)[held.codes.numpy()].reshape(24, 3, 32)
    numbers = held.scales.numpy().reshape(24, 3, form.numbers)
    values = levels * numbers[..., :1] + (numbers[..., 1:] if form.numbers == 2 else np.float32(0))
    assert np.array_equal(values.reshape(24, 96), held.values(torch.float32).numpy())


@pytest.mark.parametrize("codes", CODES)
def test_each_element_goes_to_the_nearest_level_and_the_greatest_stays(codes):
    form, x = LowBit(codes, 32), matrix()
    found = packed(x, form).values(torch.float32)
    blocks, levels = x.view(24, 3, 32), torch.tensor(form.levels)
    scale, *least = scales_of(x, form).view(24, 3, form.numbers).unbind(-1)
    known = levels * scale[..., None] + (least[0][..., None] if least else 0.0)
    distance = (blocks[..., None] - known[..., None, :]).abs()
    # with a least value the share of a step is that of a rounded difference
    nearness = 2e-7 if least else 0.0
    away = (blocks - found.view_as(blocks)).abs()
    torch.testing.assert_close(away, distance.amin(-1), rtol=0, atol=nearness)
    kept = [blocks.argmax(-1, keepdim=True), blocks.argmin(-1, keepdim=True)]
    if form.numbers == 1:
        kept = [blocks.abs().argmax(-1, keepdim=True)]
    for one in kept:
        torch.testing.assert_close(
            found.view_as(blocks).gather(-1, one), blocks.gather(-1, one), rtol=1e-6, atol=0
        )


def test_blocks_of_16_levels_from_any_least_value_come_back_as_they_were():
    """What llama.cpp calls Q4_1, and torch's own product with 4 bits: codes from a least value."""
    draw = torch.Generator().manual_seed(2)
    step, least = torch.rand(9, 1, generator=draw) + 0.1, torch.randn(9, 1, generator=draw)
    codes = torch.randint(16, (9, 32), generator=draw)
    codes[:, 0], codes[:, 1] = 0, 15
    codes[4] = 0  # a block of one value
    x, form = least + codes * step, LowBit("uint4", 32)
    assert torch.equal(codes_of(x, scales_of(x, form), form), codes)
    torch.testing.assert_close(rounded(x, form), x, rtol=0, atol=1e-6)


def test_bytes_are_those_that_others_pack_by_eight_into_a_word():
    """Low codes first, shifted by 2^(bits - 1): compressed-tensors' "pack-quantized"."""
    x = matrix()
    form = LowBit("int4", 32)
    held = packed(x, form)
    words = held.codes.view(torch.int32)
    numbers = codes_of(x, held.scales, form) - 8
    shifts = torch.arange(8, dtype=torch.int64) * 4
    found = (words[..., None].to(torch.int64) >> shifts) & 15
    assert torch.equal(found.flatten(-2) - 8, numbers)
    assert numbers.min() == -8 and numbers.max() == 7


def test_nf4_is_what_its_appendix_says_of_it():
    """Levels are quantiles of a normal distribution, so that all are met about equally often."""
    form = LowBit("nf4", 64)
    levels = torch.tensor(form.levels, dtype=torch.float64)
    normal = torch.distributions.Normal(0.0, 1.0)
    offset = 0.9677083  # appendix E: the outermost quantile
    positive = normal.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -normal.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    expected = torch.cat((negative, torch.zeros(1, dtype=torch.float64), positive.flip(0)))
    expected /= expected.abs().max()
    torch.testing.assert_close(levels, expected, rtol=0, atol=2e-7)
