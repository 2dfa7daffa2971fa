"""Training with a V-shaped schedule and with an op kind of one row: the bits of 1F1B."""

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from ptdmpi.comm.world import World
from ptdmpi.engine.engine import Engine
from ptdmpi.model.stage import Stage
from ptdmpi.plan.layout.grid import grid_of
from tests._configs import layout, small
from tests._engines import VOCAB_SIZE, microbatches, whole_weights
from tests.parallel import parallel
from tests.plan.schedule.test_new_kinds import added

SIZES = {"model.layers": 9, "model.hidden": 8, "model.seq_length": 4, "batch.micro_size": 1}
STEPS = 2


def trained(comm, schedule: str, virtual: int, **changes) -> tuple:
    """(losses, norms, validation loss, parameters, spans' kinds) after `STEPS` steps."""
    world = World(comm)
    config = small({**SIZES, **changes, **layout(p=comm.size, v=virtual)}, comm.size)
    parallel_section = config.parallel.model_copy(update={"schedule": schedule})
    config = config.model_copy(update={"parallel": parallel_section})
    engine = Engine(config, world.split(grid_of(config)), VOCAB_SIZE)
    results = [engine.step(k, microbatches(config, k, 0)) for k in range(STEPS)]
    valid = engine.evaluate(microbatches(config, STEPS, 0))["task"].sum
    kinds = {span.kind for span in results[-1].spans}
    assert all(stage.in_flight == 0 for stage in engine.stages.values())
    assert engine.runner.most_in_flight == 0  # of the validation
    told = [(result.loss, result.grad_norm) for result in results]
    return told, valid, whole_weights(engine), kinds


def same(found: tuple, expected: tuple) -> None:
    assert found[:2] == expected[:2]
    assert found[2].keys() == expected[2].keys()
    assert all(torch.equal(values, expected[2][name]) for name, values in found[2].items())


@pytest.mark.cases(2)
@parallel(ranks=[1, 2, 4], limit_s=120)
def test_a_v_trains_with_the_bits_of_1f1b(comm):
    """Embedding and head, a tied table, stand on one rank, and losses are not on the last one."""
    expected = trained(comm, "1f1b", 1)
    with added():
        same(trained(comm, "vee", 2), expected)


@contextlib.contextmanager
def deferred_weight_gradients() -> Iterator[None]:
    """B keeps what it would add to the gradients to itself, W adds it: as zero-bubble does."""
    whole = Stage.backward_microbatch
    kept: dict[tuple[int, int], list] = {}

    def inputs_only(stage, microbatch, dy):
        gradients = [weight.main_grad for _, weight in stage.trained_parameters()]
        before = [gradient.clone() for gradient in gradients]
        for gradient in gradients:
            gradient.zero_()
        result = whole(stage, microbatch, dy)
        kept[id(stage), microbatch] = [gradient.clone() for gradient in gradients]
        for gradient, value in zip(gradients, before, strict=True):
            gradient.copy_(value)
        return result

    def weights(stage, microbatch, nothing):
        assert nothing is None
        own = kept.pop((id(stage), microbatch))
        for (_, weight), value in zip(stage.trained_parameters(), own, strict=True):
            weight.main_grad += value

    with (
        patch.object(Stage, "backward_microbatch", inputs_only),
        patch.object(Stage, "weights_microbatch", weights, create=True),
    ):
        yield
    assert not kept


@pytest.mark.cases(2)
@parallel(ranks=[1, 2, 4], limit_s=120)
def test_an_op_kind_of_one_row_trains_with_the_bits_of_1f1b(comm):
    """Along the tree of a reproducible run a leaf is complete after its W, not after its B."""
    changes = {"run.reproducible": True}
    expected = trained(comm, "1f1b", 1, **changes)
    with added(), deferred_weight_gradients():
        found = trained(comm, "split", 1, **changes)
    same(found, expected)
    assert "weights" in found[3] and "weights" not in expected[3]
