"""Codes of blocks: packed, unpacked and rounded on the way are the same numbers, in torch and in a
file; what is known of their errors holds."""

import numpy as np
import pytest
import torch

from ptdmpi.checkpoint.boxes import _levels
from ptdmpi.model.low_bit.codes import codes_of, packed, rounded, scales_of
from ptdmpi.plan.shape.low_bit import CODES, LowBit


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
def test_a_file_s_reader_has_the_same_levels(codes):
    form = LowBit(codes, 32)
    held = packed(matrix(), form)
    levels = _levels(form)[held.codes.numpy()].reshape(24, 3, 32)
    values = (levels * held.scales.numpy()[..., None]).reshape(24, 96)
    assert np.array_equal(values, held.values(torch.float32).numpy())


@pytest.mark.parametrize("codes", CODES)
def test_each_element_goes_to_the_nearest_level_and_the_greatest_stays(codes):
    form, x = LowBit(codes, 32), matrix()
    found = packed(x, form).values(torch.float32)
    blocks, levels = x.view(24, 3, 32), torch.tensor(form.levels)
    scale = scales_of(x, form)[..., None]
    distance = (blocks[..., None] - levels * scale[..., None]).abs()
    assert torch.equal((blocks - found.view_as(blocks)).abs(), distance.amin(-1))
    greatest = blocks.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(
        found.view_as(blocks).gather(-1, greatest), blocks.gather(-1, greatest), rtol=1e-6, atol=0
    )


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
    assert numbers.abs().max() == 7


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
