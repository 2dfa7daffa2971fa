"""Sums of gradients that are begun while the last backward is under way: the same bits, early."""

import pytest

from ptdmpi.comm.communicator import Communicator
from ptdmpi.engine.runner import OpHook
from tests._configs import layout
from tests._engines import microbatches, steps_of
from tests.comm._stand_in import Pauses, StandInCommunicator
from tests.comm.test_nccl import STAND_IN, curve, engine_on
from tests.parallel import parallel

FOUR = {"model.layers": 4}
EXPERTS = {
    **FOUR,
    "model.kind": "llama",
    "model.expert_hidden": 16,
    "model.experts": 4,
    "model.experts_per_token": 2,
    "parallel.expert": 2,
}
LAYOUTS = {
    "alone": {**layout(), **FOUR, "batch.micro_size": 1},
    "recomputed": {**layout(), **FOUR, "recompute.mode": "full"},
    "tensor": {**layout(t=2), **FOUR, "parallel.sequence_parallel": True},
    "interleaved": {**layout(p=2, v=2), **FOUR, "parallel.schedule": "interleaved"},
    "put off": {**layout(p=2), **FOUR, "parallel.schedule": "zb-h1"},
    "zero": {**layout(p=2), **FOUR, "parallel.zero": 1, "precision.compute": "bf16"},
    "experts": {**layout(), **EXPERTS},
    "experts put off": {**layout(p=2), **EXPERTS, "parallel.schedule": "zb-h1"},
    "experts zero": {**layout(), **EXPERTS, "parallel.zero": 1},
    "zero in groups": {**layout(), **FOUR, "parallel.zero": 1, "parallel.shard_group": 2},
}
SHORT = ("put off", "zero", "tensor")


@pytest.mark.cases(1)
@parallel(ranks=[4])
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in SHORT else pytest.mark.long) for one in LAYOUTS]
)
def test_the_bits_are_those_of_one_sum_at_the_end(comm, name):
    """And nothing hangs where a device pauses inside of every compute."""
    expected = curve(engine_on(comm, LAYOUTS[name]), 2)
    engine = engine_on(comm, LAYOUTS[name], STAND_IN)
    assert engine.policy.sums is not None
    engine.runner.hooks.insert(0, Pauses(StandInCommunicator.library))
    assert curve(engine, 2) == expected


class Diary(OpHook):
    """What happens when: ops, and sums over the data axis."""

    def __init__(self, group: Communicator) -> None:
        self.lines: list[str] = []
        usual = group.all_reduce_begin

        def begin(tensor, op="sum"):
            self.lines.append(f"sum of {tensor.numel()}")
            return usual(tensor, op)

        group.all_reduce_begin = begin

    def begin(self, op) -> None:
        self.lines.append(f"{op} begins")

    def end(self, op, microbatch) -> None:
        self.lines.append(f"{op} ends")


@parallel(ranks=[2])
def test_each_layer_is_summed_as_soon_as_its_gradient_is_complete(comm):
    """In the last backward alone, the last layer first; the embedding when all is over."""
    engine = engine_on(comm, LAYOUTS["alone"], STAND_IN)
    diary = Diary(engine.axes["data"])
    engine.runner.hooks.insert(0, diary)
    steps_of(engine, 1)
    sums = [line for line in diary.lines if line.startswith("sum")]
    units = engine.buffer.gradient_units
    assert len(sums) == len(units) > 5
    last = f"B0.{engine.schedule.microbatches - 1}"
    inside = diary.lines[
        diary.lines.index(f"{last} begins") + 1 : diary.lines.index(f"{last} ends")
    ]
    assert inside == sums
    layers = [unit for unit in units if unit.name.isdigit()]
    first, final = layers[0].stop - layers[0].start, layers[-1].stop - layers[-1].start
    assert first == final and inside.count(f"sum of {first}") == len(layers)
    assert all(line.endswith("ends") for line in diary.lines[-1:])


@parallel(ranks=[2])
def test_a_step_that_was_only_looked_at_leaves_nothing_behind(comm):
    engine = engine_on(comm, LAYOUTS["alone"], STAND_IN)
    expected = curve(engine_on(comm, LAYOUTS["alone"], STAND_IN), 1)
    batches = microbatches(engine.config, 1, engine.axes["data"].rank)
    sums = engine.policy.sums
    with sums.looked_at(lambda parameter: None):
        engine.accumulate(1, batches, engine.stopwatch())
    assert not sums._begun  # what stands in the buffer is this rank's own
    engine.accumulate(1, batches, engine.stopwatch())
    assert sums._begun
    assert curve(engine, 1) == expected
