"""ZB-H1 and ZB-V: complete, executable on every wire, as short as the papers say, and holding no
more than 1F1B's first rank does."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptdmpi.plan.schedule.held import held, most_held
from ptdmpi.plan.schedule.ops import ACTIVATIONS, OPERANDS, Op
from ptdmpi.plan.schedule.orders import build
from ptdmpi.plan.schedule.program import check, post_early, programs
from ptdmpi.plan.schedule.simulate import Costs, execute, simulate

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 21)]
VIRTUAL = {"zb-h1": 1, "zb-v": 2}


def waiting(order) -> int:
    """Most microbatches of a rank, in chunks, from their forward to their W: each op at once."""
    found = now = 0
    for op in order:
        now += (op.kind == "F") - (op.kind == "W")
        found = max(found, now)
    return found


@pytest.mark.parametrize("kind", VIRTUAL)
@pytest.mark.parametrize("p", range(1, 9))
def test_every_size_is_complete_ascending_and_executable(kind, p):
    for m in range(1, 21):
        schedule = build(kind, p, VIRTUAL[kind], m)
        every = [Op(k, s, i) for k in "FIW" for s in range(schedule.stages) for i in range(m)]
        assert sorted(op for order in schedule.orders for op in order) == sorted(every)
        times = execute(schedule, Costs(1.0, 2.0, 0.25))
        for op, interval in times.items():
            assert all(times[need].end_s <= interval.start_s for need in schedule.needs(op))
        for order in schedule.orders:
            for one, other in pairwise(sorted(order)):
                if one[:2] == other[:2]:
                    assert order.index(one) < order.index(other)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "zb-v" else pytest.mark.long) for kind in VIRTUAL],
)
@given(st.sampled_from(SIZES))
def test_no_wire_deadlocks(kind, sizes):
    """On one that meets for every message, and with receives that are posted early."""
    p, m = sizes
    found = programs(build(kind, p, VIRTUAL[kind], m))
    check(found)
    check([post_early(program) for program in found], nonblocking_receives=True)


def test_w_waits_for_its_own_i_alone_and_completes_the_gradient():
    schedule = build("zb-h1", 2, 1, 3)
    assert schedule.needs(Op("I", 0, 1)) == (Op("I", 1, 1), Op("F", 0, 1))
    assert schedule.needs(Op("W", 0, 1)) == (Op("I", 0, 1),)
    assert schedule.source(Op("W", 0, 1)) is None
    assert schedule.completes_gradients(Op("W", 0, 1))
    assert not schedule.completes_gradients(Op("I", 0, 1))


@given(
    st.integers(1, 10),
    st.integers(0, 20),
    st.sampled_from([(1, 2, 0.5), (1, 3, 1 / 3), (2, 4, 0.4), (1.5, 2.5, 0.2), (1, 1, 0.5)]),
)
def test_h1_idles_as_its_closed_form_says(p, more, costs):
    """(p - 1)(F + I - W), where W takes no longer than I and F: Qi et al. 2023, section 2.3."""
    forward_s, backward_s, share = costs
    costs = Costs(forward_s, backward_s, weight_share=share)
    m = p + more
    schedule = build("zb-h1", p, 1, m)
    idle_s = (p - 1) * (forward_s + costs.input_s - costs.weight_s)
    timeline = simulate(schedule, costs)
    assert timeline.makespan_s == pytest.approx(m * (forward_s + backward_s) + idle_s)
    closed = schedule.bubble_closed_form(forward_s, costs.input_s, costs.weight_s)
    assert timeline.bubble_fraction() == pytest.approx(closed)
    assert closed <= build("1f1b", p, 1, m).bubble_closed_form(1, 1, 1) * (1 + 1e-9)


@pytest.mark.parametrize("p", range(1, 9))
def test_h1_holds_no_more_than_rank_0(p):
    for m in range(1, 21):
        for rank, order in enumerate(build("zb-h1", p, 1, m).orders):
            assert waiting(order) <= min(p, m)
            assert most_held(order, lambda kept, _: kept == ACTIVATIONS) == min(p - rank, m)
            assert most_held(order, lambda kept, _: 1) <= min(p, m)


@pytest.mark.parametrize("p", range(1, 9))
def test_v_idles_for_little_but_the_way_to_the_last_rank(p):
    """All ops of one cost: no step is shorter than 6 m + p - 1 (Qi et al. 2023, section 6: a rank
    idles for nothing between its first op and its last); some are, by less than p."""
    for m in range(p, 21):
        makespan_s = simulate(build("zb-v", p, 2, m), Costs(1.0, 2.0)).makespan_s
        assert 6 * m + p - 1 <= makespan_s <= 6 * m + p - 1 + p // 2
        one = simulate(build("1f1b", p, 1, m), Costs(2.0, 4.0)).makespan_s
        assert makespan_s - 6 * m <= (one - 6 * m) / 3


def test_v_of_four_ranks_is_the_shortest_there_is():
    """As drawn: Qi et al. 2023, Figure 6 has 4 ranks."""
    for m in (4, 8, 12):
        schedule = build("zb-v", 4, 2, m)
        assert simulate(schedule, Costs(1.0, 2.0)).makespan_s == 6 * m + 3
        assert schedule.bubble_closed_form(1, 1, 1) == pytest.approx(3 / (6 * m))


@pytest.mark.parametrize("p", range(1, 9))
def test_v_holds_2p_halves_on_every_rank(p):
    """As much as 1F1B's rank 0, whose p microbatches have a stage of twice the size."""
    for m in range(1, 21):
        schedule = build("zb-v", p, 2, m)
        peaks = [waiting(order) for order in schedule.orders]
        assert max(peaks) <= 2 * p
        if m >= p:
            assert peaks == [2 * p] * p
        for rank, order in enumerate(schedule.orders):
            assert {op.stage for op in order} == {rank, 2 * p - 1 - rank}
            assert most_held(order, lambda kept, _: kept in (ACTIVATIONS, OPERANDS)) <= 2 * p


def test_what_is_traded_is_part_of_the_working_memory():
    """I trades activations for operands, and says how much it has of both; W lets these go."""
    (order,) = build("zb-h1", 1, 1, 1).orders
    assert " ".join(map(str, order)) == "F0.0 I0.0 W0.0"
    sizes = {ACTIVATIONS: 3, OPERANDS: 7}
    works = {"inputs": 8, "weights": 2}
    moments = held(order, lambda name, _: sizes[name], lambda name, _: works[name])
    assert [(moment.during, moment.after) for moment in moments] == [(3, 3), (8, 7), (9, 0)]
