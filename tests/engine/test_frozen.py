"""Parameters that do not train: no gradient, master or moments; all others train as if they did."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ptdmpi.checkpoint.share import share
from ptdmpi.comm.world import World
from ptdmpi.config import ModelConfig
from ptdmpi.engine import engine as engines
from ptdmpi.model.stage import Stage
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.layer.parts import Part
from ptdmpi.plan.shape import parameters
from tests._configs import layout
from tests._engines import build, microbatches, steps_of, whole_gradients
from tests.parallel import parallel

FROZEN = (".mlp.", "norm", "embedding.")


class PartlyFrozen(Stage):
    """A stage of which attention alone trains, and the head where it is not tied."""

    def __init__(self, *given, **named) -> None:
        super().__init__(*given, **named)
        for name, weight in self.named_logical_parameters():
            if any(part in name for part in FROZEN):
                weight.declaration = replace(weight.declaration, trains=False)


@parallel(ranks=[1, 4])
@pytest.mark.parametrize(
    ("precision", "tied", "recompute"),
    [("fp32", True, "none"), ("fp32", False, "full"), ("bf16", True, "none")],
)
def test_what_trains_trains_as_before_and_the_rest_stays(comm, precision, tied, recompute):
    changes = {
        "precision.compute": precision,
        "model.tie_embeddings": tied,
        "recompute.mode": recompute,
        "optimizer.clip_norm": 0.0,
    }
    if comm.size == 4:
        changes |= layout(t=2, p=2) | {"parallel.sequence_parallel": True}
    whole = build(World(comm), changes)
    with patch.object(engines, "Stage", PartlyFrozen):
        partly = build(World(comm), changes)
    assert not any(part in name for name in partly.buffer.entries for part in FROZEN)
    assert len(partly.buffer.entries) + len(partly.buffer.frozen) == len(whole.buffer.entries)
    sizes = [flat.numel() for flat in (partly.buffer.masters[0], partly.buffer.gradients)]
    assert sizes[0] == sizes[1] < whole.buffer.masters[0].numel()
    before = {
        n: e.view(partly.buffer.idle_weights).clone() for n, e in partly.buffer.frozen.items()
    }
    (expected,), (found,) = steps_of(whole, 1), steps_of(partly, 1)
    assert found.loss == expected.loss and 0.0 < found.grad_norm < expected.grad_norm
    gradients = whole_gradients(whole)
    for name, gradient in whole_gradients(partly).items():
        assert torch.equal(gradient, gradients[name]), name
    for name, entry in partly.buffer.frozen.items():
        assert torch.equal(entry.view(partly.buffer.idle_weights), before[name]), name
        assert whole.buffer.entries[name].declaration.shape == entry.declaration.shape


@contextmanager
def only_the_head_trains() -> Iterator[None]:
    """By the one table that model and planner read: the last norm and, untied, the head."""

    def frozen(make: Callable[..., dict[str, Part]], trained: str = "") -> Callable[..., Any]:
        def made(model: ModelConfig, *given: int, **named: int) -> dict[str, Part]:
            kept = () if model.tie_embeddings else (trained,)
            parts = make(model, *given, **named)
            return {name: replace(part, trains=name in kept) for name, part in parts.items()} | {
                name: part for name, part in parts.items() if name == "final_norm"
            }

        return made

    with (
        patch.object(parameters, "embedding", frozen(parameters.embedding)),
        patch.object(parameters, "layer", frozen(parameters.layer)),
        patch.object(parameters, "head", frozen(parameters.head, "head")),
    ):
        yield


@parallel(ranks=[1, 2])
@pytest.mark.parametrize("reproducible", [False, True])
def test_a_stage_of_which_nothing_trains(comm, reproducible):
    """The first of two: it has no backward of its own, no gradient, norm, moment or file."""
    changes = {"run.reproducible": reproducible, "model.tie_embeddings": False} | layout(
        p=comm.size
    )
    changes |= {"optimizer.clip_norm": 0.0}
    whole = build(World(comm), changes)
    with only_the_head_trains():
        partly = build(World(comm), changes)
    idle = comm.size == 2 and comm.rank == 0
    assert bool(partly.buffer.masters) != idle
    assert len(partly.buffer.entries) + len(partly.buffer.frozen) == len(whole.buffer.entries)
    (expected,), (found, later) = steps_of(whole, 1), steps_of(partly, 2)
    assert found.loss == expected.loss and 0.0 < found.grad_norm < expected.grad_norm
    assert not later.skipped and later.loss != found.loss
    assert partly.runner.most_in_flight == 0 if idle else partly.runner.most_in_flight > 0
    partly.buffer.gradients.zero_()
    partly.accumulate(0, microbatches(partly.config, 0, 0), partly.stopwatch())
    assert all(stage.in_flight == 0 for stage in partly.stages.values())
    assert bool(list(share(partly.state, partly.axes))) != idle


@parallel(ranks=[1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_memory_counts_what_does_not_train_as_weights_alone(comm, precision, tied):
    changes = {"precision.compute": precision, "model.tie_embeddings": tied}
    changes |= layout(p=comm.size) | {"model.hidden": 256, "model.vocab_size": 256}
    with only_the_head_trains():
        engine = build(World(comm), changes)
        memory = MemoryModel.of(engine.config, engine.vocab_size)
        rank = engine.axes["pipeline"].rank
        foreseen = memory.peak(engine.config.layout, rank, engine.config.microbatches)
    buffer = engine.buffer
    masters = sum(part.nbytes for part in buffer.masters)
    apart = masters * (not buffer.one_type)
    held = sum(flat.nbytes for flat in engine.state.flats) - masters
    assert foreseen.weights == buffer.weights.nbytes + buffer.idle_weights.nbytes
    assert foreseen.gradients == buffer.gradients.nbytes
    assert foreseen.optimizer == held + apart
