"""Training with products in 8-bit floating point: the same bits where layouts have the same bits,
and losses near those of bf16."""

import pytest
import torch
from mpi4py import MPI

from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.model.kernels.float8 import Float8Kernels
from ptdmpi.model.tensor_parallel import LayerLinear
from ptdmpi.train import checks
from tests._configs import layout, small
from tests._engines import HALVES, assert_same_bits, build, greatest_difference, train
from tests.parallel import parallel
from tests.train.test_memory import MODES, check_one

# two heads of 128 elements: two tensor ranks cut no block of 128
FLOAT8 = {
    "precision.compute": "fp8",
    "model.layers": 2,
    "model.hidden": 256,
    "model.heads": 2,
    "model.ffn_hidden": 512,
}
# Losses of two layouts or two precisions: e5m2 has steps of a quarter, bfloat16 sums of 2^-8.
NEAR = 5e-3


@pytest.mark.cases(1)
@parallel(ranks=[4], limit_s=120)
@pytest.mark.parametrize("name", ["d and p", "schedules", "gathered weights"])
def test_layouts_have_the_same_bits(comm, name):
    """d and p with reproducible sums, schedules and recomputation, and gathered weights."""
    changes = FLOAT8 | {"model.layers": 3, "batch.global_size": 4, "batch.micro_size": 1}
    cases = [layout(d=2), layout(p=2), layout(p=2, d=2)]
    if name == "d and p":
        changes["run.reproducible"] = True
    elif name == "schedules":
        cases = [
            layout(p=2) | {"recompute.mode": "full"},
            layout(p=3) | {"parallel.schedule": "zb-h1"},
            {"recompute.mode": "selective"},
        ]
    else:
        changes |= layout(d=2) | {"parallel.zero": 2}
        cases = [{"parallel.zero": 3}]
    expected = train(comm, changes, steps=2)
    for where in cases:
        assert_same_bits(train(comm, changes | where, steps=2), expected)


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_train_as_one_rank(comm, sequence_parallel):
    where = layout(t=2) | {"parallel.sequence_parallel": sequence_parallel}
    found = train(comm, FLOAT8 | where)
    for precision in ("fp8", "bf16"):
        alone = train(comm, FLOAT8 | {"precision.compute": precision})
        assert greatest_difference(found.losses, alone.losses) < NEAR
        assert found.losses != alone.losses


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("fp8", ["block", "delayed"])
def test_a_training_needs_the_memory_of_its_account(mode, half, fp8):
    check_one(MPI.COMM_SELF, MODES[mode] | {"precision.compute": "fp8", "precision.fp8": fp8}, half)


def test_only_the_linears_of_layers_are_rounded():
    """Not the embedding, the head, or the products of attention."""
    engine = build(World(MPI.COMM_SELF), FLOAT8)
    (stage,) = engine.stages.values()
    rounded = [
        name
        for name, module in stage.named_modules()
        if isinstance(getattr(module, "kernels", None), Float8Kernels)
    ]
    ends = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    assert rounded == [f"layers.{layer}.{end}" for layer in range(2) for end in ends]
    linears = [module for module in stage.modules() if isinstance(module, LayerLinear)]
    # attention keeps the input of its last linear, so no codes are kept in addition
    assert [linear.keeps_codes for linear in linears] == [True, False, True, True] * 2
    assert {weight.dtype for weight in engine.buffer.weight_parts} == {torch.bfloat16}


REFUSED = {
    "experts": ({"model.experts": 2, "model.experts_per_token": 1}, "model.experts = 2"),
    "adapters": ({"adapt.method": "lora"}, 'adapt.method = "lora"'),
    "compiled": ({"run.compile": True}, "run.compile = true"),
    "quantized": ({"quantize.weights": "int8"}, 'quantize.weights = "int8"'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_combined_is_refused(name):
    changes, key = REFUSED[name]
    with pytest.raises(InputError, match=f'"fp8" cannot be combined with {key}'):
        small(FLOAT8 | changes)


def test_tensor_ranks_that_cut_a_block_are_refused():
    refusals = checks.refusals
    legal = small(FLOAT8 | layout(t=2), 2)
    assert list(refusals(legal.layout, legal.model)) == []
    narrow = FLOAT8 | {"model.hidden": 128}
    whole = small(narrow | layout(t=2) | {"precision.fp8": "delayed"}, 2)
    assert list(refusals(whole.layout, whole.model)) == []
    assert list(refusals(small(narrow).layout, small(narrow).model)) == []
    config = small(narrow | layout(t=2), 2)
    lines = list(refusals(config.layout, config.model))
    assert lines and all("cuts blocks of 128 x 128 weights" in line for line in lines)
    assert "attention.qkv" in lines[0] and "legal nearby: tensor 1" in lines[0]
