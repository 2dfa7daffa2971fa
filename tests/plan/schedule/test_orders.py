"""Every schedule is complete, ordered and executable, and idles no more than the closed forms."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptdmpi.config import InputError
from ptdmpi.config.choices import CHUNKS, default_schedule
from ptdmpi.plan.schedule.ops import Op
from ptdmpi.plan.schedule.orders import KINDS, build
from ptdmpi.plan.schedule.simulate import Costs, execute, simulate

P, V, M = st.integers(1, 8), st.integers(1, 4), st.integers(1, 32)
COSTS = st.sampled_from([Costs(1.0, 1.0), Costs(1.0, 2.0)])


def build_any(kind, p, v, m):
    return build(kind, p, CHUNKS.get(kind, v), m)


SCHEDULES = st.builds(build_any, st.sampled_from(sorted(KINDS)), P, V, M)


@given(SCHEDULES)
def test_every_op_runs_once_on_the_rank_of_its_stage(schedule):
    kinds = {"forward": "F", "zb-h1": "FIW", "zb-v": "FIW"}.get(schedule.kind, "FB")
    stages, microbatches = range(schedule.stages), range(schedule.microbatches)
    expected = sorted(Op(k, s, i) for k in kinds for s in stages for i in microbatches)
    assert sorted(op for order in schedule.orders for op in order) == expected
    for rank, order in enumerate(schedule.orders):
        if schedule.kind != "zb-v":
            assert {op.stage % schedule.pipeline for op in order} == {rank}
        assert {schedule.rank_of(op.stage) for op in order} == {rank}


@given(SCHEDULES, COSTS)
def test_every_op_starts_after_its_needs(schedule, costs):
    times = execute(schedule, costs)
    assert len(times) == sum(map(len, schedule.orders))
    for op, (start_s, end_s) in times.items():
        assert end_s - start_s == costs.duration_s(op)
        for need in schedule.needs(op):
            assert times[need].end_s <= start_s
    for order in schedule.orders:
        for before, after in pairwise(order):
            assert times[before].end_s <= times[after].start_s


@given(SCHEDULES)
def test_every_stage_runs_its_microbatches_in_ascending_order(schedule):
    for order in schedule.orders:
        for kind, stage in {(op.kind, op.stage) for op in order}:
            microbatches = [op.microbatch for op in order if op[:2] == (kind, stage)]
            assert microbatches == list(range(schedule.microbatches))


def test_needs_name_the_neighbouring_stage_and_the_own_forward():
    schedule = build("interleaved", 2, 2, 4)
    assert schedule.stages == 4
    assert schedule.needs(Op("F", 0, 3)) == ()
    assert schedule.needs(Op("F", 2, 3)) == (Op("F", 1, 3),)
    assert schedule.needs(Op("B", 3, 1)) == (Op("F", 3, 1),)
    assert schedule.needs(Op("B", 1, 1)) == (Op("B", 2, 1), Op("F", 1, 1))
    assert schedule.source(Op("B", 3, 1)) is None
    assert schedule.source(Op("B", 1, 1)) == Op("B", 2, 1)


@given(st.sampled_from(["1f1b", "interleaved", "gpipe"]), P, V, st.integers(1, 4), COSTS)
def test_makespan_and_bubble_reach_the_closed_forms(kind, p, v, groups, costs):
    """Narayanan et al. 2021, sections 2.2.1 and 2.2.2, for m a multiple of p."""
    m = groups * p
    schedule = build_any(kind, p, v, m)
    timeline = simulate(schedule, costs)
    both = costs.forward_s + costs.backward_s
    assert timeline.makespan_s == pytest.approx((m * schedule.virtual + p - 1) * both)
    assert timeline.bubble_fraction() == pytest.approx((p - 1) / (schedule.virtual * m))
    closed = schedule.bubble_closed_form(costs.forward_s, costs.input_s, costs.weight_s)
    assert closed == pytest.approx((p - 1) / (schedule.virtual * m))


@given(P, M, COSTS)
def test_1f1b_reaches_the_closed_form_for_every_m(p, m, costs):
    makespan_s = simulate(build("1f1b", p, 1, m), costs).makespan_s
    assert makespan_s == pytest.approx((m + p - 1) * (costs.forward_s + costs.backward_s))


@given(P, V, M, COSTS)
def test_interleaved_takes_at_most_as_long_as_m_rounded_up(p, v, m, costs):
    rounded_up = -(-m // p) * p
    makespan_s = simulate(build("interleaved", p, v, m), costs).makespan_s
    assert makespan_s <= simulate(build("interleaved", p, v, rounded_up), costs).makespan_s


@given(P, V, M)
def test_forward_alone_takes_what_filling_and_m_v_forwards_take(p, v, m):
    makespan_s = simulate(build("forward", p, v, m), Costs()).makespan_s
    assert makespan_s <= -(-m // p) * p * v + p - 1
    if m % p == 0:
        assert makespan_s == m * v + p - 1


@given(P, M)
def test_interleaved_with_one_chunk_is_1f1b(p, m):
    assert build("interleaved", p, 1, m).orders == build("1f1b", p, 1, m).orders


@given(P, V, M)
def test_peak_activations(p, v, m):
    assert build("gpipe", p, v, m).peak_activations() == (m * v,) * p
    assert build("1f1b", p, 1, m).peak_activations() == tuple(min(p - r, m) for r in range(p))
    assert build("forward", p, v, m).peak_activations() == (1,) * p
    if m % p == 0 and v > 1:
        peaks = tuple(min(2 * (p - r - 1) + (v - 1) * p + 1, m * v) for r in range(p))
        assert build("interleaved", p, v, m).peak_activations() == peaks


@given(st.sampled_from("FBIW"), st.integers(0, 999), st.integers(0, 9999))
def test_ops_print_and_parse(kind, stage, microbatch):
    op = Op(kind, stage, microbatch)
    assert Op.parse(str(op)) == op
    assert str(Op("F", 2, 0)) == "F2.0"


@pytest.mark.parametrize(
    "text", ["", "F2", "X2.0", "F2.0 ", "F-1.0", "f2.0", "F2.0->3", "F\u00b2.0"]
)
def test_other_text_is_no_op(text):
    with pytest.raises(ValueError, match="is not an op"):
        Op.parse(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", 4, 1, 8), r'"1f2b" is unknown: did you mean "1f1b"\? Legal are gpipe, 1f1b'),
        (("zzzzzz", 4, 1, 8), r'"zzzzzz" is unknown: Legal are'),
        (("1f1b", 0, 1, 8), "pipeline is 0, must be at least 1"),
        (("1f1b", 4, 0, 8), "virtual is 0, must be at least 1"),
        (("gpipe", 4, 1, -1), "microbatches is -1, must be at least 1"),
        (
            ("1f1b", 4, 2, 8),
            '"1f1b" has virtual = 1, not 2; legal: schedule = "interleaved"',
        ),
    ],
)
def test_what_cannot_be_built_is_refused_with_what_can(arguments, message):
    with pytest.raises(InputError, match=message):
        build(*arguments)


def test_default_kind_depends_on_the_chunks_alone():
    assert (default_schedule(1), default_schedule(2)) == ("1f1b", "interleaved")
