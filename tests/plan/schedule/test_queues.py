"""What wires hand to devices cannot deadlock there; what only MPI can bear is reported."""

import itertools

import pytest
from hypothesis import given

from ptdmpi.plan.schedule.ops import Op
from ptdmpi.plan.schedule.orders import KINDS, DeadlockError
from ptdmpi.plan.schedule.program import (
    Compute,
    MismatchError,
    Receive,
    Send,
    check,
    post_early,
    programs,
)
from tests.plan.schedule._queues import check_queues
from tests.plan.schedule.test_program import SCHEDULES, TWO_RANKS, build_any, put

WAYS = [
    {"per_pair": per_pair, "pauses": pauses}
    for per_pair, pauses in itertools.product((False, True), repeat=2)
]
# every kind of schedule x p x v x m, those of one number of chunks once
CASES = {
    (kind, p, schedule.placement.virtual, m): schedule
    for kind in sorted(KINDS)
    for p in (2, 3, 4, 8)
    for v in (1, 2, 3)
    for m in (p, 2 * p, 2 * p + 1, 4 * p)
    for schedule in [build_any(kind, p, v, m)]
}


def deadlocks(orders, **way) -> bool:
    try:
        check_queues(orders, **way)
    except DeadlockError:
        return True
    return False


@pytest.mark.long
def test_what_the_wires_use_deadlocks_in_no_case_and_early_receives_do():
    """Receives that are begun early hang wherever messages share one queue, and in queues for each
    pair as soon as a device pauses; nothing hangs in the order that wires of devices are given."""
    one_queue, paused, per_pair = set(), set(), set()
    for case, schedule in CASES.items():
        usual = programs(schedule)
        for way in WAYS:
            check_queues(usual, **way)
        moved = [post_early(program) for program in usual]
        check(moved, nonblocking_receives=True)
        for hung, way in (
            (one_queue, {"per_pair": False}),
            (paused, {"pauses": True}),
            (per_pair, {}),
        ):
            if deadlocks(moved, **way):
                hung.add(case)
    assert {case[0] for case in CASES} == set(KINDS)
    # forwards of one chunk per rank send one way only, and wait for nobody behind them
    one_way = {case for case in CASES if (case[0], case[2]) == ("forward", 1)}
    assert one_queue == paused == CASES.keys() - one_way and not per_pair


@given(SCHEDULES)
def test_any_schedule_is_executed_in_queues(schedule):
    for way in WAYS:
        check_queues(programs(schedule), **way)


@given(SCHEDULES)
def test_what_is_computed_is_sent_before_anything_else_is_computed(schedule):
    for program in programs(schedule):
        computed = None
        for action in program:
            if isinstance(action, Compute):
                computed = action.op
            elif isinstance(action, Send):
                assert action.op == computed


def test_programs_of_two_ranks_in_queues():
    check_queues(TWO_RANKS)
    with pytest.raises(DeadlockError, match=r"deadlock: rank 1 at F0\.1<-0"):
        check_queues(put(0, 3))
    with pytest.raises(MismatchError, match=r"F0\.0->1 meets the receive F0\.1<-0 of rank 1"):
        first, second = Op("F", 0, 0), Op("F", 0, 1)
        swapped = (Receive(second, 0), Receive(first, 0))
        check_queues((TWO_RANKS[0], (*swapped, *(a for a in TWO_RANKS[1] if a not in swapped))))
    with pytest.raises(MismatchError, match=r"F0\.0->1 runs before F0\.0 is computed"):
        first = Op("F", 0, 0)
        check_queues(put(0, 0, Send(first, 1), Compute(first)))


def test_a_compute_waits_for_its_queue_and_messages_for_theirs():
    """Two messages that cross: in one queue each rank holds up the other's."""
    mine, theirs = Op("F", 0, 0), Op("F", 1, 0)
    # stage 0's op goes to rank 1, and rank 0 asks for stage 1's B before it sends
    back, last = Op("B", 1, 0), Op("B", 0, 0)
    crossed = (
        (Compute(mine), Receive(back, 1), Send(mine, 1), Compute(last)),
        (Receive(mine, 0), Compute(theirs), Compute(back), Send(back, 0)),
    )
    check_queues(crossed)
    with pytest.raises(DeadlockError, match=r"rank 0 at B1\.0<-1, rank 1 at F0\.0<-0"):
        check_queues(crossed, per_pair=False)
    with pytest.raises(DeadlockError, match="rank 0 at "):
        check(crossed)
