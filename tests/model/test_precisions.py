"""The one table of precisions: what torch, the planner and the configuration make of each row."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from mpi4py import MPI

from ptdmpi.comm.world import World
from ptdmpi.config import Layout, PrecisionConfig
from ptdmpi.config.precision import (
    BFLOAT16,
    FLOAT32,
    PRECISIONS,
    NumberType,
    Precision,
    PrecisionName,
    Recipe,
)
from ptdmpi.engine.engine import Engine
from ptdmpi.model.kernels import Kernels
from ptdmpi.model.parameters import data_types, dtype_of
from ptdmpi.plan.layer.sizes import Sizes
from ptdmpi.plan.layout.grid import grid_of
from tests._configs import small
from tests._engines import VOCAB_SIZE, steps_of


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


WIDE = Precision(BFLOAT16, FLOAT32, Recipe(FLOAT32, FLOAT32))


def test_a_new_row_is_trained_and_priced(monkeypatch):
    """Weights and activations in bfloat16, whose products are taken in float32: its name and its
    row are all that is added."""
    monkeypatch.setitem(PRECISIONS, "wide", WIDE)
    known = small()
    wide = known.precision.model_copy(update={"compute": "wide"})
    config = known.model_copy(update={"precision": wide})
    axes = World(MPI.COMM_SELF).split(grid_of(config))
    engine = Engine(config, axes, VOCAB_SIZE)
    assert engine.kernels.widens("cpu", torch.bfloat16)
    assert not engine.kernels.widens("cpu", torch.float64)
    assert {one.dtype for one in engine.buffer.weight_parts} == {torch.bfloat16}
    (told,) = steps_of(engine, 1)
    (exact,) = steps_of(Engine(known, axes, VOCAB_SIZE), 1)
    assert told.loss == pytest.approx(exact.loss, rel=1e-3)
    sizes = [Sizes(config.model, config.layout, name) for name in ("wide", "bf16")]
    assert sizes[0].compute_bytes == sizes[1].compute_bytes == 2


def test_products_that_no_kernel_takes_are_refused():
    scaled = replace(WIDE, product=Recipe(NumberType("float8_e4m3fn", 1), FLOAT32))
    with pytest.raises(ValueError, match="no kernel multiplies by"):
        Kernels(precision=scaled)
