"""What a rank holds at once: that of every moment of its order, in few."""

import pytest

from ptdmpi.plan.schedule.flight import fullest
from ptdmpi.plan.schedule.orders import BACKWARD, KINDS, build

CASES = [
    (kind, p, v, m)
    for kind in ("gpipe", "1f1b", "interleaved")
    for p, v in ((1, 1), (2, 1), (4, 1), (1, 3), (2, 2), (4, 3), (5, 2))
    for m in (1, 2, 3, 4, 7, 8, 12, 13, 29, 41)
    if kind != "1f1b" or v == 1
]


def moments(kind, p, v, m, rank):
    """(running chunk, what each chunk holds) at every backward, op by op."""
    held = [0] * v
    for op in KINDS[kind](p, v, m, rank):
        if op.kind == BACKWARD:
            yield op.stage // p, tuple(held)
            held[op.stage // p] -= 1
        else:
            held[op.stage // p] += 1
    assert held == [0] * v


def exceeds(one, other):
    return all(a >= b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("kind", "p", "v", "m"), CASES)
def test_no_moment_of_the_order_holds_more(kind, p, v, m):
    """And each of them is one of the order, however long the step is."""
    for rank in range(p):
        found = fullest(kind, p, v, m, rank)
        every = set(moments(kind, p, v, m, rank))
        assert set(found) <= every
        for running, held in every:
            assert any(one.running == running and exceeds(one.held, held) for one in found)


@pytest.mark.parametrize(("kind", "p", "v", "m"), CASES)
def test_an_earlier_rank_holds_no_less(kind, p, v, m):
    for rank in range(1, p):
        before = fullest(kind, p, v, m, rank - 1)
        for one in fullest(kind, p, v, m, rank):
            assert any(b.running == one.running and exceeds(b.held, one.held) for b in before)


@pytest.mark.parametrize(("kind", "p", "v", "m"), CASES)
def test_the_most_in_all_chunks_is_that_of_the_schedule(kind, p, v, m):
    peaks = build(kind, p, v, m).peak_activations()
    assert [max(sum(one.held) for one in fullest(kind, p, v, m, r)) for r in range(p)] == [*peaks]


def test_validation_keeps_nothing():
    assert [one.held for one in fullest("forward", 2, 2, 5, 0)] == [(1, 1)]
