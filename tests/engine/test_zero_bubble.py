"""Training with ZB-H1 and ZB-V, whose weight gradients are put off: the bits of 1F1B."""

import pytest
import torch

from benchmarks.speed import makespans
from ptdmpi.comm.world import World
from ptdmpi.engine.engine import Engine
from ptdmpi.plan.layout.grid import grid_of
from tests._configs import layout, small
from tests._engines import VOCAB_SIZE, microbatches, whole_weights
from tests.parallel import parallel

SIZES = {"model.layers": 8, "model.hidden": 16, "model.seq_length": 8, "batch.micro_size": 1}
DROPOUT = {"model.dropout": 0.1, "model.attention_dropout": 0.1}
STEPS = 2
BERT = {"model.kind": "bert"}
LLAMA = {"model.kind": "llama", "model.kv_heads": 2, "model.tie_embeddings": True}


def trained(comm, schedule: str, tensor: int, **changes) -> tuple:
    """(losses and norms, parameters, kinds of spans) after `STEPS` steps."""
    virtual = 2 if schedule == "zb-v" else 1
    sizes = layout(t=tensor, p=comm.size // tensor, v=virtual)
    config = small({**SIZES, **changes, **sizes, "parallel.schedule": schedule}, comm.size)
    engine = Engine(config, World(comm).split(grid_of(config)), VOCAB_SIZE)
    results = [engine.step(k, microbatches(config, k, 0)) for k in range(STEPS)]
    for stage in engine.stages.values():
        assert stage.in_flight == 0 and not stage._put_off
    told = [(result.loss, result.grad_norm, result.loss_scale) for result in results]
    return told, whole_weights(engine), {span.kind for span in results[-1].spans}


def check(comm, tensor: int = 1, **changes) -> None:
    expected = trained(comm, "1f1b", tensor, **changes)
    for schedule in ("zb-h1", "zb-v"):
        told, weights, spans = trained(comm, schedule, tensor, **changes)
        assert told == expected[0]
        assert weights.keys() == expected[1].keys()
        for name, values in weights.items():
            assert torch.equal(values, expected[1][name]), name
        assert {"inputs", "weights"} <= spans and "backward" not in spans


@parallel(ranks=[pytest.param(1, marks=pytest.mark.long), 2, 4], limit_s=120)
def test_same_bits_as_1f1b(comm):
    """With a tied table, which in a V stands on one rank, and dropout."""
    check(comm, **DROPOUT)


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize(
    "changes",
    [
        {"recompute.mode": "full"} | DROPOUT,
        {"recompute.mode": "selective", "precision.compute": "bf16"},
        {"precision.compute": "fp16"} | LLAMA,
        pytest.param({"precision.compute": "fp64"} | BERT, marks=pytest.mark.long),
        pytest.param({"run.reproducible": True}, marks=pytest.mark.long),
    ],
)
def test_same_bits_in_other_settings(comm, changes):
    check(comm, **changes)


@pytest.mark.long
@parallel(ranks=[2], limit_s=120)
def test_same_bits_with_divided_sequences(comm):
    beside_a_tensor_axis(comm, True)


@pytest.mark.long
@parallel(ranks=[4], limit_s=120)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_same_bits_with_a_tensor_axis(comm, sequence_parallel):
    beside_a_tensor_axis(comm, sequence_parallel)


def beside_a_tensor_axis(comm, sequence_parallel: bool) -> None:
    changes = {"parallel.sequence_parallel": sequence_parallel, "recompute.mode": "full"}
    changes |= {"recompute.partition_activations": not sequence_parallel}
    check(comm, tensor=2, **changes, **DROPOUT)


@pytest.mark.long
@parallel(ranks=[2, 4], limit_s=120)
def test_stages_that_sleep_take_at_least_what_is_simulated(comm):
    """How much longer than the simulation depends on the machine: it is printed, not judged."""
    for row in makespans.rows(comm, repeats=1):
        assert row.taken_s >= row.simulated_s
        if comm.rank == 0:
            print(row)
