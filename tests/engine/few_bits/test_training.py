"""Training with weights that products take in few bits: what is computed, in every layout."""

import pytest
import torch

from benchmarks.planning.allocated import measured
from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.model.low_bit.codes import rounded
from ptdmpi.plan.layer.low_bit import CODES, LowBit
from tests._configs import layout, small
from tests._engines import (
    assert_same_bits,
    build,
    foreseen_by,
    greatest_difference,
    load,
    steps_of,
    train,
    whole_gradients,
    whole_weights,
)
from tests.parallel import parallel

INT4 = {"quantize.weights": "int4", "quantize.block": 8}


@parallel(ranks=[1])
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_of_rounded_weights_and_go_straight_through(comm, codes, precision):
    changes = {"precision.compute": precision, "optimizer.clip_norm": 0.0}
    asked = changes | INT4 | {"quantize.weights": codes}
    if precision == "bf16":  # masters that bf16 holds exactly: what is rounded is the same
        asked, changes = ({**one, "model.init_std": 0.0625} for one in (asked, changes))
    found, plain = build(World(comm), asked), build(World(comm), changes)
    whole = {n: w.to(torch.bfloat16).float() for n, w in whole_weights(found).items()}
    load(found, whole)
    linears = ("attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight")
    form, low = LowBit(codes, 8), dict(whole)
    for name in (name for name in whole if name.endswith(linears)):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        low[name] = rounded(whole[name].to(dtype), form).float()
        assert not torch.equal(low[name], whole[name])
    load(plain, low)
    (one,), (other,) = steps_of(found, 1), steps_of(plain, 1)
    assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    gradients = whole_gradients(plain)
    for name, values in whole_gradients(found).items():
        assert torch.equal(values, gradients[name]), name
    after = whole_weights(found)
    name = "layers.1.mlp.up.weight"  # the master moves by less than a level, and keeps it
    assert not torch.equal(after[name], whole[name])
    assert not torch.equal(after[name], rounded(after[name], form))


@pytest.mark.cases(1)
@parallel(ranks=[4])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(layout(t=2, p=2), marks=pytest.mark.long),
        layout(t=2, d=2) | {"parallel.sequence_parallel": True, "parallel.zero": 3},
        layout(p=2, d=2) | {"parallel.schedule": "zb-h1", "parallel.zero": 1},
    ],
    ids=["t2p2", "t2d2-sp-zero3", "p2d2-zbh1-zero1"],
)
def test_every_layout_trains_alike(comm, changes):
    """In fp64, in which no element is near enough to the middle of two levels to change sides."""
    asked = INT4 | {"precision.compute": "fp64", "batch.micro_size": 1}
    expected = train(comm, asked, steps=3)
    found = train(comm, asked | changes, steps=3)
    assert greatest_difference(found.losses, expected.losses) < 1e-12
    assert greatest_difference(found.norms, expected.norms) < 1e-11


@parallel(ranks=[2])
def test_data_ranks_have_the_bits_of_one(comm):
    asked = INT4 | {"run.reproducible": True, "precision.compute": "bf16"}
    assert_same_bits(train(comm, asked | layout(d=2), steps=2), train(comm, asked, steps=2))


@parallel(ranks=[1])
@pytest.mark.parametrize(
    ("precision", "half"),
    [
        pytest.param("fp32", "native", marks=pytest.mark.long),
        pytest.param("bf16", "native", marks=pytest.mark.long),
        ("bf16", "widened"),
    ],
)
def test_the_account_has_what_a_product_makes(comm, precision, half):
    changes = {"model.hidden": 256, "precision.compute": precision, "batch.micro_size": 1}
    low = changes | {"quantize.weights": "int8"}
    peaks, foreseen = [], []
    for asked in (changes, low):
        engine = build(World(comm), asked, half=half)
        steps_of(engine, 1)
        peaks.append(measured(lambda one=engine: steps_of(one, 1))[1])
        foreseen.append(foreseen_by(engine).peak(engine.config.layout, 0, 8).total)
    assert 0 < peaks[1] - peaks[0] <= foreseen[1] - foreseen[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quantize.weights": "int4", "quantize.block": 64}, "legal nearby: 8 or 16 or 32"),
        (INT4 | {"parallel.tensor": 4, "quantize.block": 16}, r"\(32, 8, 32\).* 2 or 4 or 8"),
        (INT4 | {"quantize.block": 7}, "quantize.block"),
        ({"quantize.block": 32}, 'no effect with quantize.weights = "none"; legal: block = 64'),
        ({"quantize.weights": "int3"}, "quantize.weights"),
    ],
)
def test_blocks_that_no_rank_has_whole_are_refused(changes, told):
    with pytest.raises(InputError, match=told):
        small(changes, changes.get("parallel.tensor", 1))
