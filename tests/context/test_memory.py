"""Memory of activations where sequences are cut, measured in a step and by the formula."""

from functools import partial

import pytest

from benchmarks.planning.allocated import measured
from ptdmpi.comm.world import World
from ptdmpi.config.choices import CONTEXT_METHODS
from tests._engines import build, foreseen_by, from_root, microbatches
from tests.parallel import names, parallel

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
    "llama, selective recomputation": {**LLAMA, "recompute.mode": "selective"},
    "llama in fp64": {**LLAMA, "precision.compute": "fp64"},
    "llama in bf16": {**LLAMA, "precision.compute": "bf16"},
    "dropout": {"model.dropout": 0.1, "model.attention_dropout": 0.1},
}
FEW = ("gpt", "llama")
# error of the formula; if keys were not counted, it would be 5 to 15 %
LIMIT = 0.03
# Processors with units for bfloat16 compute blocks of scores at once. Rank 0 has the last
# positions, which see the most keys; the blocks of other ranks are smaller. A single head needs no
# copies.
OF_BLOCKS = 0.3
# PyTorch's kernel packs operands in bfloat16 in buffers of its own, which the formula does not
# count: up to 0.7 MiB here, on a Xeon with AMX, where it computes sequences of 1,024 or more.
PACKED = 2**20
OF_SCORES = 0.1  # if scores are kept for their dropout: the formula counts hashes, too (6 MiB)
DEEP = {
    "model.kind": "llama",
    "model.layers": 4,
    "model.hidden": 128,
    "model.ffn_hidden": 384,
    "model.kv_heads": 4,
}
GROWTH = 0.05


def peak(world: World, changes, length: int) -> tuple[int, int]:
    """Return the bytes that a step of one microbatch has at its peak, in addition to the state: as
    measured, and by the formula."""
    cut = {"model.seq_length": length, "parallel.context": world.size}
    engine = build(world, {**MODEL, **changes, **cut})
    whole = microbatches(engine.config, 0, 0)
    batches = [batch.at(engine.context.positions) for batch in whole]
    engine.step(0, batches)  # what the first step makes, such as buffers of messages, stays
    _, found = measured(partial(engine.step, 1, batches))
    footprint = foreseen_by(engine).peak(engine.config.layout, 0, 1)
    return found, footprint.activations + footprint.working


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@names(SHAPES, short=FEW)
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_activations_shrink_with_c_as_the_formula_says(comm, method, name):
    """On every rank. Four ranks share a longer sequence, so that the library's memory for attention
    (1 MiB) is below the peak."""
    changes = {**SHAPES[name], "parallel.context_method": method}
    found, foreseen = peak(World(comm), changes, LENGTH * max(1, comm.size // 2))
    limit = OF_SCORES if name == "dropout" else LIMIT
    least = 1 - (OF_BLOCKS if "bf16" in name else limit)
    packed = PACKED if "bf16" in name else 0
    within = least * foreseen < found < (1 + limit) * foreseen + packed
    assert within, (name, comm.size, found, foreseen)


@pytest.mark.cases(1)
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


@parallel(ranks=[4], limit_s=400.0)
@pytest.mark.long
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_a_length_that_doubles_with_c_needs_no_more_memory(comm, method):
    """Methods that keep nothing of other ranks: 1,024 positions on one rank, 2,048 on two, and
    4,096 on four."""
    found = []
    for size in (1, 2, 4):
        part = World(comm).first(size)
        if part is not None:
            changes = {**DEEP, "parallel.context_method": method}
            found.append(peak(part, changes, LENGTH * size)[0])
        from_root(comm, None)
    if comm.rank == 0:
        assert max(found) / found[0] - 1 < GROWTH, found
