"""Silent corruption: a flipped bit of one rank's state is found before the next update that is
verified, and named."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from ptdmpi.comm.world import World
from ptdmpi.config.methods import FeedbackName
from ptdmpi.engine.corruption import COLUMNS, CorruptState, Fault, hash_of
from ptdmpi.engine.engine import Engine
from ptdmpi.model.state import USED, WEIGHTS
from tests._configs import layout
from tests._engines import build, microbatches
from tests.parallel import parallel

LONG = pytest.mark.long
EVERY = 3
MATRIX = "layers.1.mlp.up.weight"


def flip(values: Tensor, place: int = 0, bit: int = 3) -> None:
    """Flip one bit of a flat tensor."""
    values.view(torch.uint8)[place] ^= 1 << bit


def held(engine: Engine, kind: str, name: str) -> Tensor:
    """Return the values in a rank's memory; empty if it has none."""
    found = (one for one in engine.state.residents() if (one.kind, one.name) == (kind, name))
    return next((one.values for one in found), torch.empty(0))


def step(engine: Engine, number: int) -> None:
    engine.step(number, microbatches(engine.config, number, engine.axes["data"].rank))


def faults(
    comm, changes: dict, kind: str, name: str = MATRIX, after: int = EVERY
) -> tuple[list[Fault], int]:
    """Train until corruption is found: that of a bit of the last rank that holds these values,
    flipped after so many steps. Return what is found, and the rank.

    Check that every rank finds the same before the first update that is verified from then on.
    """
    engine = build(World(comm), {"run.verify_every": EVERY} | changes)
    for number in range(after):
        step(engine, number)
    values = held(engine, kind, name)
    rank = max(r for r, size in enumerate(comm.allgather(len(values))) if size)
    if rank == comm.rank:
        flip(values)
    due = (after // EVERY + 1) * EVERY
    for number in range(after, due - 1):
        step(engine, number)
    updates = engine.state.counters.updates
    with pytest.raises(CorruptState) as error:
        step(engine, due - 1)
    assert engine.state.counters.updates == updates
    found = error.value.faults
    assert comm.allgather(str(error.value)) == [str(error.value)] * comm.size
    return list(found), rank


WHERE = {
    2: [layout(d=2), layout(d=2) | {"precision.compute": "bf16"}],
    4: [layout(d=4), layout(t=2, d=2), layout(p=2, d=2), layout(d=4) | {"parallel.shard_group": 2}],
}


@pytest.mark.cases(4)
@parallel(ranks=[2, 4])
@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=LONG), pytest.param(2, marks=LONG), 3])
@pytest.mark.parametrize("kind", [WEIGHTS, "exp_avg_sq"])
def test_state_that_changes_is_found_and_named(comm, zero, kind):
    """In the step before a verified update: then the rank knows that it is its own."""
    for chosen in WHERE[comm.size]:
        if "parallel.shard_group" in chosen and zero == 0:
            continue
        sharded = chosen | {"parallel.zero": zero}
        found, rank = faults(comm, sharded, kind, after=EVERY - 1)
        assert found[0] == Fault(kind, MATRIX, (rank,), changed=True)


@parallel(ranks=[2, 4])
def test_replicas_that_drift_apart_are_found(comm):
    """Flipped long before a verified update: of two replicas both are named, of more the odd one;
    and nothing before is called corrupt."""
    found, rank = faults(comm, layout(d=comm.size), "exp_avg")
    odd = Fault("exp_avg", MATRIX, (rank,), tuple(range(rank)))
    both = Fault("exp_avg", MATRIX, (0, 1))
    assert (odd if comm.size == 4 else both) in found


@parallel(ranks=[2, pytest.param(4, marks=LONG)])
def test_what_the_tensor_axis_replicates_is_compared(comm):
    name = "layers.0.mlp_norm.weight"
    chosen = layout(t=comm.size) | {"parallel.sequence_parallel": True}
    found, rank = faults(comm, chosen, WEIGHTS, name)
    named = {(fault.name, fault.ranks) for fault in found if fault.kind == WEIGHTS}
    assert named == {(name, (0, 1) if comm.size == 2 else (rank,))}


@parallel(ranks=[2])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_weights_in_use_are_compared_before_they_are_replaced(comm, zero):
    """They follow their masters, so a flipped bit is gone after the update; not before it."""
    chosen = layout(d=2) | {"precision.compute": "bf16", "parallel.zero": zero}
    found, rank = faults(comm, chosen, USED, after=EVERY - 1)
    assert found == [Fault(USED, MATRIX, (rank,), changed=True)]


@parallel(ranks=[2])
def test_a_frozen_base_is_compared(comm):
    lora = {"adapt.method": "lora", "adapt.rank": 4}
    for few_bits in ({}, {"quantize.weights": "int8", "quantize.block": 8}):
        kind = "codes" if few_bits else USED
        found, _ = faults(comm, layout(d=2) | lora | few_bits, kind)
        assert Fault(kind, MATRIX, (0, 1)) in found


@parallel(ranks=[4])
def test_replicas_that_may_differ_are_compared_along_other_axes(comm):
    local = layout(t=2, d=2) | {"data_parallel.method": "local", "data_parallel.local_steps": 8}
    name = "layers.0.mlp_norm.weight"
    found, _ = faults(comm, local, WEIGHTS, name)
    assert Fault(WEIGHTS, name, (2, 3)) in found
    assert {fault.ranks for fault in found} == {(2, 3)}


COMPRESSED = {
    "data_parallel.method": "compressed",
    "data_parallel.compressor": "top_k",
    "data_parallel.ratio": 0.1,
}


@parallel(ranks=[2])
def test_state_that_the_reduction_changes_is_compared_before_it(comm):
    feedback = COMPRESSED | {"data_parallel.error_feedback": "mem_sgd"}
    found, _ = faults(comm, layout(d=2) | feedback, "error", after=2 * EVERY - 1)
    assert found == [Fault("error", MATRIX, (1,), changed=True)]


METHODS = [
    layout(d=2) | {"parallel.zero": 2},
    layout(t=2) | {"precision.compute": "bf16"},
    layout(p=2) | {"model.tie_embeddings": True},
    layout(d=2) | {"data_parallel.method": "local", "data_parallel.local_steps": 2},
    layout(d=2) | {"optimizer.kind": "muon", "parallel.zero": 1},
    layout(d=2) | {"parallel.offload": "optimizer", "optimizer.ema_decay": 0.9},
    layout(d=2) | {"data_parallel.method": "decentralized", "data_parallel.compressor": "int8"},
    *(
        layout(d=2) | COMPRESSED | {"data_parallel.error_feedback": feedback}
        for feedback in get_args(FeedbackName)
    ),
]


@pytest.mark.cases(2)
@parallel(ranks=[2])
@pytest.mark.parametrize("number", range(len(METHODS)))
def test_a_run_without_faults_has_nothing_corrupt(comm, number):
    """And the same bits as without verification."""
    results = []
    for every in (0, 1):
        engine = build(World(comm), METHODS[number] | {"run.verify_every": every})
        for k in range(4):
            step(engine, k)
        engine.verification.before_save()
        results.append([part.clone() for part in engine.state.flats])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("length", [256, 5 * COLUMNS + 24, 8 * COLUMNS + 1])
def test_every_single_bit_changes_the_hash(dtype, length):
    torch.manual_seed(length)
    values = torch.randint(256, (length,), dtype=torch.uint8).to(dtype)
    before = hash_of(values)
    size = values.nbytes
    for place in {0, 1, 7, 8, size // 2, size - 1}:
        for bit in range(8):
            flip(values, place, bit)
            assert hash_of(values) != before
            flip(values, place, bit)
    assert hash_of(values) == before


def test_two_flipped_signs_do_not_cancel():
    values = torch.randn(4 * COLUMNS)
    before = hash_of(values)
    values[1] *= -1
    values[3] *= -1
    assert hash_of(values) != before


def test_findings_in_words():
    name = "rank {} (host)".format
    one = Fault("exp_avg", "a", (3,), changed=True)
    assert (
        one.text(name) == "exp_avg of a on rank 3 (host) changed between an update and the next one"
    )
    odd = Fault("weights", "a", (2,), (0, 1))
    assert odd.text(name).endswith(
        "on rank 2 (host) differs from that on rank 0 (host), rank 1 (host)"
    )
    both = Fault("weights", "a", (0, 1))
    assert both.text(name).endswith(
        "differs on rank 0 (host), rank 1 (host), and it is unknown which is right"
    )
