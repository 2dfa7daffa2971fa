"""The one table of precisions: what torch, the planner and the configuration make of each row."""

from typing import get_args

import pytest
import torch

from ptdmpi.config import Layout, PrecisionConfig
from ptdmpi.config.precision import PRECISIONS, PrecisionName
from ptdmpi.model.parameters import data_types, dtype_of
from ptdmpi.plan.cost.kept.activations import Sizes
from tests._configs import small


def test_every_row_can_be_chosen():
    assert get_args(PrecisionName) == tuple(PRECISIONS)
    for name in PRECISIONS:
        assert PrecisionConfig(compute=name).scales_loss == (name == "fp16")


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_row_has_the_types_of_torch(name):
    row, types = PRECISIONS[name], data_types(name)
    for number in (row.compute, row.master, row.iteration, row.product.operands, row.product.sums):
        assert dtype_of(number).itemsize == number.bytes
    assert (types.compute, types.master) == (dtype_of(row.compute), dtype_of(row.master))
    assert types.iteration == (torch.float64 if name == "fp64" else torch.bfloat16)
    # nothing that is summed is narrower than what it is the sum of
    assert row.product.sums.bytes >= max(4, row.product.operands.bytes) <= row.master.bytes
    assert row.has_masters == (row.compute.bytes < row.master.bytes)


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_planner_counts_the_bytes_of_a_row(name):
    sizes = Sizes(small().model, Layout(1, 1, 1), name)
    types = data_types(name)
    assert (sizes.compute_bytes, sizes.wide_bytes) == (
        types.compute.itemsize,
        types.master.itemsize,
    )
