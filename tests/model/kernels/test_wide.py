"""Sums of 16-bit tensors in a wider type, a few rows at a time."""

from unittest import mock

import pytest
import torch

from ptdmpi.model.kernels import wide

HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("shape", [(1, 3), (64, 5), (65, 4), (300, 7), (3, 0), (0, 4)])
def test_sums_of_rows(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    total = wide.sum_of_rows(x, torch.float32)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), x.double().sum(0), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", HALF)
def test_a_sum_of_few_columns_has_the_bits_of_the_same_columns_among_many(dtype):
    """So a tensor rank computes its own elements of a bias as one rank does."""
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    whole = wide.sum_of_rows(x, torch.float32)
    assert torch.equal(wide.sum_of_rows(x[:, 16:32].contiguous(), torch.float32), whole[16:32])


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(9, 7), (1, 40), (40, 1), (3, 0), (0, 3)])
def test_additions_have_the_bits_of_one_addition(shape, dtype):
    draw = torch.Generator().manual_seed(3)
    total = torch.randn(shape, generator=draw, dtype=torch.float64)
    total = total.to(torch.promote_types(dtype, torch.float32))
    x = torch.randn(shape, generator=draw).to(dtype)
    expected = total + x
    with mock.patch.object(wide, "ADDED_ELEMENTS", 16):
        wide.add(total, x)
    assert torch.equal(total, expected)
