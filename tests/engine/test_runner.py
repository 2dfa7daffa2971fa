"""The runner executes the schedule: in its order, with its number of activations, and says where
it was when something failed."""

import itertools

import pytest
import torch

from ptdmpi.comm.world import World
from ptdmpi.engine.runner import OpHook
from ptdmpi.model.batch import MicrobatchPass
from tests._configs import layout
from tests._engines import build, microbatches, steps_of
from tests.parallel import parallel

SCHEDULES = [("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]


def engine_of(comm, schedule: str, virtual: int, **changes):
    sizes = {"model.layers": 13, "model.hidden": 8, "model.seq_length": 4}
    sizes |= {"batch.global_size": 5, "batch.micro_size": 1}
    where = layout(p=comm.size, v=virtual) | {"parallel.schedule": schedule}
    return build(World(comm), {**sizes, **where, **changes})


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("batch", [1, 5])
def test_holds_as_many_activations_as_the_schedule_says(comm, schedule, virtual, batch):
    engine = engine_of(comm, schedule, virtual, **{"batch.global_size": batch})
    steps_of(engine, 1)
    assert engine.runner.most_in_flight == engine.schedule.peak_activations()[comm.rank]
    assert all(stage.in_flight == 0 for stage in engine.stages.values())
    with torch.no_grad():
        engine.evaluate(microbatches(engine.config, 0, 0))
    assert engine.runner.most_in_flight == 0


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_timeline_is_the_schedule(comm, schedule, virtual):
    engine = engine_of(comm, schedule, virtual)
    (result,) = steps_of(engine, 1)
    computed = [span for span in result.spans if span.kind in ("forward", "backward")]
    assert [span.op for span in computed] == [str(op) for op in engine.schedule.orders[comm.rank]]
    assert all((span.kind == "forward") == span.op.startswith("F") for span in computed)
    assert all(span.rank == comm.rank for span in result.spans)
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(computed))
    kinds = {span.kind for span in result.spans}
    assert {"reduce", "optimizer"} <= kinds
    assert ("receive" in kinds) == (comm.size > 1)


@parallel(ranks=[2])
def test_a_failure_shows_its_place_in_the_schedule(comm):
    engine = engine_of(comm, "1f1b", 1)

    def fail(microbatch, x):
        raise RuntimeError("no luck")

    (stage,) = engine.stages.values()
    if comm.rank == 0:
        stage.forward_microbatch = fail  # nobody waits for this rank: rank 1 runs nothing
        with pytest.raises(RuntimeError, match="no luck") as caught:
            steps_of_without_messages(engine)
        (note,) = caught.value.__notes__
        assert note.startswith("in op F0.0 of this rank's schedule:")
        assert "  F0.0   <-- here" in note.splitlines()


@parallel(ranks=[1])
def test_a_hook_goes_with_its_context_whatever_happens_in_it(comm):
    engine = engine_of(comm, "1f1b", 1)
    (policy,) = engine.runner.hooks
    heard: list[str] = []

    class Listener(OpHook):
        def begin(self, op):
            heard.append(f"{op} begins")

        def end(self, op, microbatch):
            heard.append(f"{op} ends")

    with pytest.raises(RuntimeError), engine.runner.hooked(Listener()):
        steps_of(engine, 1)
        raise RuntimeError
    assert engine.runner.hooks == [policy]
    told = [f"{op} {what}" for op in engine.schedule.orders[0] for what in ("begins", "ends")]
    assert heard == told


def steps_of_without_messages(engine) -> None:
    given = microbatches(engine.config, 0, 0)
    passes = [MicrobatchPass(number, batch, 0) for number, batch in enumerate(given)]
    engine.runner.run(engine.schedule, engine.program, passes, engine.stopwatch())
