"""Memory of activations where sequences are cut, measured in a step and by the formula."""

from functools import partial

import pytest

from benchmarks.planning.allocated import measured
from ptdmpi.comm.world import World
from ptdmpi.plan.cost.memory import MemoryModel
from tests._engines import VOCAB_SIZE, build, microbatches
from tests.parallel import parallel

LENGTH = 1024
MODEL = {
    "model.layers": 3,
    "model.hidden": 64,
    "model.heads": 4,
    "model.kv_heads": 2,
    "batch.global_size": 1,
    "batch.micro_size": 1,
}
LLAMA = {"model.kind": "llama", "model.ffn_hidden": 192}
SHAPES = {
    "gpt": {},
    "llama": LLAMA,
    "llama, full recomputation": {**LLAMA, "recompute.mode": "full"},
    "llama in fp64": {**LLAMA, "precision.compute": "fp64"},
}
LIMIT = 0.03  # error of the formula; if keys were not counted, it would be 5 to 15 %


def peak(world: World, changes, length: int) -> tuple[int, int]:
    """Return the bytes that a step of one microbatch has at its peak, in addition to the state: as
    measured, and by the formula."""
    cut = {"model.seq_length": length, "parallel.context": world.size}
    engine = build(world, {**MODEL, **changes, **cut})

    def step(number: int) -> None:
        batches = microbatches(engine.config, number, 0)
        engine.step(number, [batch.at(engine.context.positions) for batch in batches])

    step(0)  # what the first step makes, such as buffers of messages, stays
    _, found = measured(partial(step, 1))
    footprint = MemoryModel.of(engine.config, VOCAB_SIZE).peak(engine.config.layout, 0, 1)
    return found, footprint.activations + footprint.working


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", SHAPES)
def test_activations_shrink_with_c_as_the_formula_says(comm, name):
    """At a fixed length, on every rank."""
    found, foreseen = peak(World(comm), SHAPES[name], LENGTH)
    assert abs(found / foreseen - 1) < LIMIT, (name, comm.size, found, foreseen)


@parallel(ranks=[2])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_length_that_grows_with_c_needs_only_more_keys(comm, name):
    """c = 1 at half of the length, and c = 2: the peak grows as the formula says, and by less than
    the keys and values of all positions would."""
    alone = World(comm).first(1)
    shorter = None if alone is None else peak(alone, SHAPES[name], LENGTH // 2)
    found, foreseen = peak(World(comm), SHAPES[name], LENGTH)
    if shorter is None:
        return
    grown = found / shorter[0]
    assert grown == pytest.approx(foreseen / shorter[1], rel=LIMIT)
    assert grown < 1.3  # twice the length on one rank needs twice the memory
