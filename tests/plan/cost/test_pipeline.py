"""The quick simulation: equal to the one that is drawn, to closed forms, never below its bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptdmpi.config.choices import default_schedule
from ptdmpi.plan.cost import pipeline
from ptdmpi.plan.cost.pipeline import StageTimes, makespan_s, timeline
from ptdmpi.plan.schedule.orders import placement


def even(p, v, forward, backward, way=0.0, overlap=False):
    stages = p * v
    ways = (0.0, *[way] * (stages - 1))
    costs = ((forward,) * stages, (backward,) * stages, ways, ways[::-1])
    return StageTimes(*costs, overlap, placement(default_schedule(v), p, v))


@pytest.mark.parametrize(("p", "v", "m"), [(1, 1, 4), (4, 1, 8), (8, 1, 3), (4, 2, 8), (4, 3, 12)])
def test_closed_form_of_even_stages(p, v, m):
    """(m v + p - 1)(t_f + t_b) of a chunk: Narayanan et al. 2021, sections 2.2.1 and 2.2.2."""
    times = even(p, v, 1.0, 2.0)
    assert makespan_s(default_schedule(v), m, times) == pytest.approx((m * v + p - 1) * 3.0)


def test_messages_that_block_cost_every_microbatch_both_ways():
    """An inner rank receives an activation and a gradient per microbatch; filling and draining pass
    every boundary once."""
    p, m, way = 4, 16, 0.1
    blocking = makespan_s("1f1b", m, even(p, 1, 1.0, 2.0, way))
    hidden = makespan_s("1f1b", m, even(p, 1, 1.0, 2.0, way, overlap=True))
    assert blocking >= (m + p - 1) * 3.0 + 2 * way * m - 1e-9
    assert (m + p - 1) * 3.0 + 2 * way * (p - 1) - 1e-9 <= hidden < blocking


numbers = st.floats(0.1, 5.0)


@st.composite
def cases(draw):
    p, v, m = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    stages = p * v
    costs = [tuple(draw(st.lists(numbers, min_size=stages, max_size=stages))) for _ in range(2)]
    ways = [draw(st.lists(st.floats(0, 1), min_size=stages, max_size=stages)) for _ in range(2)]
    if p == 1:
        ways = [[0.0] * stages, [0.0] * stages]
    ways[0][0] = ways[1][-1] = 0.0
    placed = placement("gpipe", p, v)
    return v, m, StageTimes(*costs, *map(tuple, ways), draw(st.booleans()), placed)


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from(["default", "gpipe"]))
def test_equal_to_the_simulation_that_is_drawn_and_above_its_bound(case, kind):
    v, m, times = case
    kind = default_schedule(v) if kind == "default" else kind
    quick = makespan_s(kind, m, times)
    assert quick == pytest.approx(timeline(kind, m, times, "").makespan_s)
    assert times.lower_bound_s(m) <= quick * (1 + 1e-9)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "p", "v", "m"),
    [
        ("1f1b", 4, 1, 203),
        ("interleaved", 3, 2, 200),
        ("gpipe", 4, 1, 203),
        pytest.param("1f1b", 4, 1, 200, marks=pytest.mark.long),
        pytest.param("interleaved", 3, 2, 203, marks=pytest.mark.long),
        pytest.param("gpipe", 4, 1, 200, marks=pytest.mark.long),
    ],
)
def test_long_steps_go_on_as_they_began(monkeypatch, kind, p, v, m):
    """Uneven stages, of which the second is slowest."""
    stages = p * v
    forward = tuple(1.0 + 0.1 * (stage == 1) for stage in range(stages))
    ways = (0.0, *[0.05] * (stages - 1))
    placed = placement(kind, p, v)
    times = StageTimes(forward, (2.0,) * stages, ways, ways[::-1], False, placed)
    whole = makespan_s(kind, m, times)
    monkeypatch.setattr(pipeline, "MOST_OPS", 20 * stages * p)
    assert makespan_s(kind, m, times) == pytest.approx(whole)
    monkeypatch.undo()
    assert makespan_s(kind, 10**9, times) == pytest.approx(10**9 / m * whole, rel=0.1)


def test_a_pipeline_of_very_many_stages_is_visited_by_whole_rounds(monkeypatch):
    """However few ops may be visited, some rounds are: the closed form (m v + p - 1)(f + b)."""
    monkeypatch.setattr(pipeline, "MOST_OPS", 10)
    for p, v, m in ((6, 1, 45), (6, 2, 60)):
        times = even(p, v, 1.0, 2.0)
        exact = pytest.approx((m * v + p - 1) * 3.0)
        assert makespan_s(default_schedule(v), m, times) == exact


def test_the_bound_is_the_time_of_even_stages():
    for v, m in ((1, 16), (2, 16)):
        times = even(8 // v, v, 1.0, 2.0)
        exact = makespan_s(default_schedule(v), m, times)
        assert times.lower_bound_s(m) == pytest.approx(exact)
