"""What a new schedule and a new kind of op cost: a row each, and everything that reads them works.

`VEE` places its stages on a V (rank r holds stages r and 2p - 1 - r, as zero-bubble schedules do),
`W` is an op of its own behind each backward. Both are dummies; tests/engine/test_new_kinds.py
trains with them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest

from ptdmpi.config import Layout
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.cost.pipeline import StageTimes, makespan_s, timeline
from ptdmpi.plan.layout.stages import split_layers
from ptdmpi.plan.machine.cluster import load_model
from ptdmpi.plan.schedule.ops import OP_KINDS, Ink, Op, OpKind
from ptdmpi.plan.schedule.orders import (
    KINDS,
    ScheduleKind,
    build,
    forwards,
    gpipe,
    one_forward_one_backward,
    placement,
)
from ptdmpi.plan.schedule.program import check, post_early, programs
from ptdmpi.plan.schedule.simulate import Costs, Timeline, simulate
from ptdmpi.plan.show.draw import figure, terminal


def on_a_v(stage: int, pipeline: int, virtual: int) -> int:
    """Down the ranks with the first p stages, and up again with the next."""
    place = stage % (2 * pipeline)
    return min(place, 2 * pipeline - 1 - place)


VEE = ScheduleKind(gpipe, on_a_v)

W = OpKind(
    letter="W",
    span="weights",
    method="weights_microbatch",
    cost="backward_s",
    share=0.5,
    mark="-",
    ink=Ink("red", ("#8c2d1f", "#b5523f", "#d18b7c", "#e8c0b6"), (88, 131, 174, 217)),
    after=("B",),
    gradients=True,
)


def with_w(rank: int, chunks: Sequence[int], pipeline: int, microbatches: int) -> Iterator[Op]:
    """1F1B with each W behind its backward."""
    for op in one_forward_one_backward(rank, chunks, pipeline, microbatches):
        yield op
        if op.kind == "B":
            yield Op("W", op.stage, op.microbatch)


@contextlib.contextmanager
def added() -> Iterator[None]:
    """The two schedules, and the op's row, for as long as the context lasts."""
    schedules = {"vee": VEE, "split": ScheduleKind(with_w)}
    with patch.dict(KINDS, schedules), patch.dict(OP_KINDS, {"W": W}):
        yield


@pytest.fixture(autouse=True)
def added_for_the_test() -> Iterator[None]:
    with added():
        yield


def checked(schedule) -> None:
    """Its programs run on the strictest wire, and with receives that are posted early."""
    found = programs(schedule)
    check(found)
    check([post_early(program) for program in found], nonblocking_receives=True)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_a_v_shaped_schedule_runs_through_programs_simulation_and_drawing(p):
    schedule = build("vee", p, 2, 5)
    assert schedule.stages_of(0) == (0, 2 * p - 1)
    assert schedule.stages_of(p - 1) == (p - 1, p)
    checked(schedule)
    checked(forwards(schedule, 3))
    timeline = simulate(schedule, Costs())
    assert timeline.makespan_s >= 5 * 2 * 3.0
    assert len(terminal(timeline, 200, color=False).splitlines()) == p + 1
    # neither of the two in the middle sends to the other: they stand on one rank
    messages = [action for program in programs(schedule) for action in program]
    assert len(messages) == 2 * (p * 2 * 5) + 2 * (2 * 5 * 2 * (p - 1))


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 7)])
def test_the_planner_prices_a_v_as_it_is_simulated(p, m):
    stages = 2 * p
    placed = placement("vee", p, 2)
    ways = tuple(
        0.0 if s == 0 or placed.rank_of(s - 1) == placed.rank_of(s) else 0.2 for s in range(stages)
    )
    back = (*ways[1:], 0.0)
    forward = tuple(1.0 + 0.1 * s for s in range(stages))
    for overlap in (False, True):
        times = StageTimes(forward, forward[::-1], ways, back, overlap, placed)
        found = makespan_s("vee", m, times)
        assert found == pytest.approx(timeline("vee", m, times, "").makespan_s)
        assert times.lower_bound_s(m) <= found * (1 + 1e-9)


def test_layers_are_dealt_by_the_placement():
    """The last stage, with the head, stands on rank 0 of a V, so others take the odd layers."""
    placed = placement("vee", 3, 2)
    counts = [len(part) for part in split_layers(20, placed, 1.0)]
    works = [
        sum(counts[stage] + (stage == 5) for stage in placed.stages_of(rank)) for rank in range(3)
    ]
    assert sum(counts) == 20 and works == [7, 7, 7]


def test_a_schedule_that_does_not_say_so_has_every_rank_asked_for_its_memory():
    """Here rank 2 of 4 has most in flight, and its stage is like that of rank 1."""
    model = load_model("l=16,h=512,a=8,s=512,V=64").config
    memory = MemoryModel(model, 64, "bf16")
    warm = {0: 3, 1: 2, 2: 0, 3: 3}  # as ranks of 1F1B
    hump = ScheduleKind(lambda r, chunks, p, m: one_forward_one_backward(warm[r], chunks, p, m))
    with patch.dict(KINDS, hump=hump):
        layout = Layout(1, 4, 1, micro_size=4, schedule="hump")
        peaks = [memory.peak(layout, rank, 8).total for rank in range(4)]
        assert memory.largest(layout, 8)[0] == 2 == peaks.index(max(peaks))
        assert not memory.fits(layout, 8, max(peaks) - 1) and memory.fits(layout, 8, max(peaks))
    vee = Layout(1, 4, 1, virtual=2, schedule="vee")
    assert memory.distinct_ranks(vee) == (0, 1, 2, 3)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (4, 6)])
def test_a_new_kind_of_op_is_a_row(p, m, tmp_path):
    schedule = build("split", p, 1, m)
    assert Op.parse("W1.3") == Op("W", 1, 3)
    assert schedule.needs(Op("W", 0, 1)) == (Op("B", 0, 1),)
    assert schedule.source(Op("W", 0, 1)) is None
    assert not schedule.completes_gradients(Op("B", 0, 1))
    assert schedule.completes_gradients(Op("W", 0, 1))
    assert build("1f1b", p, 1, m).completes_gradients(Op("B", 0, 1))
    assert schedule.peak_activations() == build("1f1b", p, 1, m).peak_activations()
    checked(schedule)
    drawn = simulate(schedule, Costs(1.0, 2.0))
    last = [span for span in drawn.spans if span.rank == p - 1]
    assert [(span.kind, span.end_s - span.start_s) for span in last[-3:]] == [
        ("forward", 1.0),
        ("backward", 2.0),
        ("weights", 1.0),
    ]
    assert drawn.busy_s(0) == m * 4.0
    assert Timeline.from_json(drawn.to_json()).spans == drawn.spans
    picture = terminal(drawn, 300, color=False)
    assert "- weights" in picture and "-" in picture.splitlines()[0]
    assert "red: weights" in terminal(drawn, 300, color=True)
    figure([drawn], tmp_path / "w.svg")
    assert W.ink.shades[0] in (tmp_path / "w.svg").read_text()


def test_what_has_no_row_is_no_op():
    with pytest.raises(ValueError, match="is not an op"):
        Op.parse("X0.0")
