"""Programs derived from schedules pass the strictest wire; naive and broken ones are reported."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptdmpi.config.choices import CHUNKS
from ptdmpi.plan.schedule.ops import Op
from ptdmpi.plan.schedule.orders import KINDS, DeadlockError, build
from ptdmpi.plan.schedule.program import (
    Compute,
    MismatchError,
    Receive,
    Send,
    check,
    post_early,
    programs,
)

P, V, M = st.integers(1, 8), st.integers(1, 4), st.integers(1, 32)
F, B = (lambda s, i: Op("F", s, i)), (lambda s, i: Op("B", s, i))


def build_any(kind, p, v, m):
    return build(kind, p, CHUNKS.get(kind, v), m)


SCHEDULES = st.builds(build_any, st.sampled_from(sorted(KINDS)), P, V, M)


def naive(schedule):
    """Each rank in its order: receive, compute, send."""
    consumer = {schedule.source(op): op for order in schedule.orders for op in order}
    result = []
    for rank, order in enumerate(schedule.orders):
        actions = []
        for op in order:
            source, sink = schedule.source(op), consumer.get(op)
            if source and schedule.rank_of(source.stage) != rank:
                actions.append(Receive(source, schedule.rank_of(source.stage)))
            actions.append(Compute(op))
            if sink and schedule.rank_of(sink.stage) != rank:
                actions.append(Send(op, schedule.rank_of(sink.stage)))
        result.append(tuple(actions))
    return tuple(result)


def with_group_cut_short(p, v, m):
    """Interleaved with the usual warm-up, and a last group of fewer than p microbatches."""
    groups = [range(i, min(i + p, m)) for i in range(0, m, p)]
    orders = []
    for rank in range(p):
        chunks = range(rank, p * v, p)
        forwards = [F(s, i) for group in groups for s in chunks for i in group]
        backwards = [B(s, i) for group in groups for s in reversed(chunks) for i in group]
        warm_up = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
        order = forwards[:warm_up]
        for pair in zip(forwards[warm_up:], backwards, strict=False):
            order += pair
        orders.append(tuple(order + backwards[m * v - warm_up :]))
    return replace(build("interleaved", p, v, m), orders=tuple(orders))


def with_all_receives_posted_first(schedule):
    """Under nonblocking receives no send ever waits: only the order of computation can deadlock."""
    lenient = naive(schedule)
    sends = [(r, a) for r, program in enumerate(lenient) for a in program if isinstance(a, Send)]
    return tuple(
        (*(Receive(a.op, sender) for sender, a in sends if a.peer == rank), *rest)
        for rank, program in enumerate(lenient)
        for rest in [[a for a in program if not isinstance(a, Receive)]]
    )


@given(SCHEDULES)
def test_programs_pass_the_rendezvous_checker(schedule):
    blocking = programs(schedule)
    check(blocking)
    check(blocking, nonblocking_receives=True)
    for program, order in zip(blocking, schedule.orders, strict=True):
        assert tuple(a.op for a in program if isinstance(a, Compute)) == order


@given(SCHEDULES)
def test_programs_with_early_receives_pass_on_a_nonblocking_wire(schedule):
    early = tuple(map(post_early, programs(schedule)))
    check(early, nonblocking_receives=True)
    for before, after in zip(programs(schedule), early, strict=True):
        for kinds in (Receive, (Compute, Send)):
            assert [a for a in before if isinstance(a, kinds)] == [
                a for a in after if isinstance(a, kinds)
            ]


@given(SCHEDULES)
def test_messages_are_the_edges_between_ranks_and_no_others(schedule):
    sent = [a for program in programs(schedule) for a in program if isinstance(a, Send)]
    ops = [op for order in schedule.orders for op in order]
    crossing = [
        Send(source, schedule.rank_of(op.stage))
        for op in ops
        if (source := schedule.source(op))
        and schedule.rank_of(source.stage) != schedule.rank_of(op.stage)
    ]
    assert sorted(map(str, sent)) == sorted(map(str, crossing))


@given(st.sampled_from(["1f1b", "interleaved"]), st.integers(2, 8), V, st.integers(2, 32))
def test_the_naive_order_is_reported_as_a_deadlock(kind, p, v, m):
    with pytest.raises(DeadlockError, match=r"rank 0 at \S+, rank 1 at "):
        check(naive(build_any(kind, p, v, m)))


def test_the_usual_warm_up_with_a_short_last_group_is_reported_as_a_deadlock():
    order = with_group_cut_short(4, 3, 8)
    assert order.orders == build("interleaved", 4, 3, 8).orders
    short = with_group_cut_short(4, 3, 5)
    with pytest.raises(DeadlockError, match="rank 0 at "):
        check(with_all_receives_posted_first(short), nonblocking_receives=True)
    with pytest.raises(DeadlockError, match=r"cannot be executed: rank 0 at \S+ \(needs "):
        programs(short)
    sound = build("interleaved", 4, 3, 5)
    check(with_all_receives_posted_first(sound), nonblocking_receives=True)


def test_actions_print():
    assert str(Compute(F(2, 0))) == "F2.0"
    assert str(Send(F(2, 0), 3)) == "F2.0->3"
    assert str(Receive(F(2, 0), 1)) == "F2.0<-1"


def test_the_programs_of_a_small_1f1b():
    assert [" ".join(map(str, program)) for program in programs(build("1f1b", 2, 1, 3))] == [
        "F0.0 F0.0->1 F0.1 F0.1->1 B1.0<-1 B0.0 F0.2 B1.1<-1 F0.2->1 B0.1 B1.2<-1 B0.2",
        "F0.0<-0 F1.0 F0.1<-0 B1.0 B1.0->0 F1.1 B1.1 B1.1->0 F0.2<-0 F1.2 B1.2 B1.2->0",
    ]


def test_an_early_receive_stands_before_one_compute_and_behind_other_receives():
    first, second = Receive(F(0, 0), 0), Receive(F(0, 1), 0)
    a, b, c = Compute(F(1, 0)), Compute(F(1, 1)), Compute(B(1, 0))
    send = Send(B(1, 0), 0)
    assert post_early((first, a, second, b)) == (first, second, a, b)
    assert post_early((a, first, second, b)) == (first, second, a, b)
    assert post_early((a, b, first)) == (a, first, b)
    assert post_early((c, send, first, a)) == (first, c, send, a)
    assert post_early(()) == ()


TWO_RANKS = (
    (Compute(F(0, 0)), Send(F(0, 0), 1), Compute(F(0, 1)), Send(F(0, 1), 1)),
    (Receive(F(0, 0), 0), Compute(F(1, 0)), Receive(F(0, 1), 0), Compute(F(1, 1))),
)


def put(rank, place, *actions):
    """TWO_RANKS with one action of `rank` replaced by `actions`."""
    changed = list(TWO_RANKS[rank])
    changed[place : place + 1] = actions
    result = list(TWO_RANKS)
    result[rank] = tuple(changed)
    return tuple(result)


def test_the_unbroken_programs_pass():
    check(TWO_RANKS)


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        (put(1, 0), MismatchError, "F1.0 runs before its input F0.0"),
        (put(1, 0, Receive(F(0, 1), 0)), MismatchError, "F0.0->1 meets the receive F0.1<-0"),
        (put(0, 1), MismatchError, "F0.1->1 meets the receive F0.0<-0 of rank 1"),
        (put(0, 3), DeadlockError, "deadlock: rank 1 at F0.1<-0"),
        (put(1, 2, Receive(F(0, 1), 1)), MismatchError, "F0.1<-1 names no other rank"),
        (put(0, 3, Send(F(0, 1), 2)), MismatchError, "F0.1->2 names no other rank"),
        (put(0, 2, Compute(F(0, 1)), Compute(F(0, 1))), MismatchError, "F0.1 is computed twice"),
        (put(0, 2, Compute(F(1, 1))), MismatchError, "rank 1: F1.0 is computed here, its stage"),
        (put(1, 3), MismatchError, "F1.1 is missing"),
        (put(0, 0, Send(F(0, 0), 1), Compute(F(0, 0))), MismatchError, "before F0.0 is computed"),
        (put(1, 1, Compute(F(1, 0)), Send(F(1, 0), 0)), DeadlockError, "rank 1 at F1.0->0"),
    ],
)
def test_broken_programs_are_reported(broken, error, message):
    with pytest.raises(error, match=message):
        check(broken)


def test_messages_that_nobody_sends_or_uses_are_reported():
    sender, receiver = TWO_RANKS
    unsent = (
        (*sender, Compute(B(0, 0)), Compute(B(0, 1))),
        (*receiver, Compute(B(1, 0)), Compute(B(1, 1))),
    )
    with pytest.raises(MismatchError, match=r"B0\.0 runs before its input B1\.0"):
        check(unsent)
    with pytest.raises(MismatchError, match=r"rank 0: receives F1\.1 and never uses it"):
        check(((*sender, Receive(F(1, 1), 1)), (*receiver, Send(F(1, 1), 0))))
    with pytest.raises(MismatchError, match="waits for a message that nobody sends"):
        check(((*sender, Receive(F(1, 1), 1)), receiver), nonblocking_receives=True)
