"""Timelines: who waits for what, at which costs, and their way through JSON."""

import json
import subprocess
import sys

import pytest

from ptdmpi.config import InputError
from ptdmpi.plan.schedule.ops import Op
from ptdmpi.plan.schedule.orders import build
from ptdmpi.plan.schedule.simulate import Costs, Span, Timeline, simulate


def spans_of(timeline, rank):
    return [(s.kind, s.op, s.start_s, s.end_s) for s in timeline.spans if s.rank == rank]


def test_two_ranks_two_microbatches_with_transfers():
    timeline = simulate(build("1f1b", 2, 1, 2), Costs(1.0, 2.0, 0.5))
    assert spans_of(timeline, 0) == [
        ("forward", "F0.0", 0.0, 1.0),
        ("forward", "F0.1", 1.0, 2.0),
        ("receive", "B1.0", 2.0, 5.0),
        ("backward", "B0.0", 5.0, 7.0),
        ("receive", "B1.1", 7.0, 8.0),
        ("backward", "B0.1", 8.0, 10.0),
    ]
    assert spans_of(timeline, 1) == [
        ("receive", "F0.0", 0.0, 1.5),
        ("forward", "F1.0", 1.5, 2.5),
        ("backward", "B1.0", 2.5, 4.5),
        ("forward", "F1.1", 4.5, 5.5),
        ("backward", "B1.1", 5.5, 7.5),
    ]
    assert (timeline.ranks, timeline.makespan_s) == ((0, 1), 10.0)
    assert timeline.busy_s(0) == timeline.busy_s(1) == 6.0
    assert timeline.busy_s(7) == 0.0
    assert timeline.bubble_fraction() == pytest.approx(4 / 6)


def test_what_stays_on_its_rank_travels_in_no_time():
    timeline = simulate(build("interleaved", 1, 3, 2), Costs(1.0, 2.0, 100.0))
    assert timeline.makespan_s == 18.0
    assert {span.kind for span in timeline.spans} == {"forward", "backward"}


def test_a_subclass_prices_each_stage():
    class LastStageIsSlow(Costs):
        def duration_s(self, op: Op) -> float:
            return 10.0 if op.stage == 1 else super().duration_s(op)

    assert simulate(build("gpipe", 2, 1, 1), LastStageIsSlow()).makespan_s == 1 + 10 + 10 + 2


def test_a_measured_timeline_may_start_anywhere_and_hold_other_work():
    spans = (
        Span(1, "forward", "F1.0", 102.0, 103.0),
        Span(0, "forward", "F0.0", 100.0, 101.0),
        Span(0, "reduce", "", 101.0, 104.0),
    )
    timeline = Timeline(spans)
    assert (timeline.ranks, timeline.start_s, timeline.makespan_s) == ((0, 1), 100.0, 4.0)
    assert timeline.bubble_fraction() == 3.0


def test_a_timeline_without_compute_has_no_bubble():
    assert Timeline(()).makespan_s == 0.0
    with pytest.raises(ValueError, match="undefined"):
        Timeline((Span(0, "data", "", 0.0, 1.0),)).bubble_fraction()


def test_json_round_trip():
    simulated = simulate(build("interleaved", 3, 2, 5), Costs(0.1, 0.3, 0.7))
    timeline = Timeline(simulated.spans, title="step 7 \u2013 measured", time_unit="ticks")
    assert Timeline.from_json(timeline.to_json()) == timeline


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"title": "", "time_unit": "s", "columns": ["rank"], "spans": []}),
        Timeline((Span(0, "forward", "F0.0", 0.0, 1.0),)).to_json().replace("1.0", '"1"'),
        Timeline((Span(0, "forward", "F0.0", 2.0, 1.0),)).to_json(),
        Timeline((Span(0, "sleep", "", 0.0, 1.0),)).to_json(),
    ],
)
def test_other_text_is_no_timeline(text):
    with pytest.raises(InputError, match="not a timeline"):
        Timeline.from_json(text)


@pytest.mark.parametrize(
    "costs",
    [
        (0.0, 1.0),
        (1.0, -1.0),
        (float("nan"), 1.0),
        (1.0, float("inf")),
        (1.0, 1.0, -1.0),
        (1e300, 1e308),
    ],
)
def test_impossible_costs_are_refused(costs):
    with pytest.raises(InputError, match=r"cost .*: legal are"):
        Costs(*costs)


@pytest.mark.long
def test_a_large_schedule_is_simulated_whole():
    timeline = simulate(build("interleaved", 64, 4, 128), Costs())
    assert timeline.makespan_s == (128 * 4 + 63) * 3


def test_planning_imports_no_heavy_library():
    code = (
        "import sys, ptdmpi.plan.schedule.program, ptdmpi.plan.layout.grid, ptdmpi.plan.show.draw\n"
        "heavy = {'torch', 'mpi4py', 'h5py', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
