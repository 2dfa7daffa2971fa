"""Ranks that wait, ranks that hold up the others, and slow ranks, in tables made by hand."""

import pytest

from ptdmpi.plan.layout.grid import training_grid
from ptdmpi.watch.slow import slow_ranks
from ptdmpi.watch.whereabouts import (
    Ranks,
    Report,
    Seen,
    culprits,
    describe,
    idle_s,
    rows,
    waits_for,
)

# t=2, p=2, d=2: ranks 0 1 | 2 3 are the tensor groups of pipeline rank 0, 4 5 | 6 7 of rank 1
RANKS = Ranks(
    training_grid(tensor=2, pipeline=2, data=2), [f"host{rank // 4}" for rank in range(8)]
)


def at(kind: str, op: str = "", peer: int | None = None, inside: str = "", age_s=50.0, **more):
    axis, _, collective = inside.partition(" ")
    return Report("training", 17, kind, op, peer, axis, collective, age_s, **more)


def table(reports: dict[int, Report], other: Report) -> dict[int, Seen]:
    return {rank: Seen(reports.get(rank, other), 1000.0) for rank in range(8)}


def test_a_rank_that_computes_holds_up_those_that_wait():
    seen = table(
        {
            2: at("forward", "F0.1", age_s=64.0),
            3: at("forward", "F0.1", inside="tensor all_reduce", age_s=64.0),
            6: at("receive", "F0.1", peer=0),
            7: at("receive", "F0.1", peer=0),
        },
        at("reduce", inside="data all_reduce", age_s=60.0),
    )
    assert waits_for(2, seen, RANKS) == []
    assert waits_for(3, seen, RANKS) == [2]
    assert waits_for(6, seen, RANKS) == [2]
    assert waits_for(7, seen, RANKS) == [3]
    assert waits_for(0, seen, RANKS) == [2]  # of the data group 0, 2
    assert waits_for(5, seen, RANKS) == [7]
    assert culprits(seen, RANKS, 1001.0) == [2]
    assert idle_s(seen, 1001.0) == 51.0
    lines = rows(seen, RANKS, 1001.0, [2])
    assert lines[0].split() == ["rank", "host", "step", "doing", "for", "needs"]
    assert lines[1].split() == ["2", "host0", "17", "F0.1", "65", "s", "<--", "here"]
    assert lines[4].split()[:4] == ["3", "host0", "17", "F0.1,"]
    assert lines[4].rstrip().endswith("in all_reduce (tensor)  65 s  2")
    assert [line.split()[0] for line in lines[1:]] == ["2", "0", "1", "3", "4", "5", "6", "7"]


def test_the_longest_comes_first():
    seen = table({3: at("data", age_s=70.0), 5: at("forward", "F1.0", age_s=90.0)}, at("receive"))
    seen |= {rank: Seen(at("receive", "F0.0", peer=0), 1000.0) for rank in (0, 1, 2, 4, 6, 7)}
    assert culprits(seen, RANKS, 1000.0) == [5, 3]


def test_a_circle_has_no_culprit():
    seen = table({}, at("optimizer", inside="world all_gather_object"))
    assert waits_for(3, seen, RANKS) == [0, 1, 2, 4, 5, 6, 7]
    assert culprits(seen, RANKS, 1000.0) == []


def test_a_rank_that_is_stopped_in_a_collective_is_the_culprit():
    """Its last report says that it waits, but the other ranks have reported since."""
    seen = table({}, at("backward", "B1.1", inside="tensor all_reduce", age_s=6.0))
    seen[2] = Seen(seen[2].report, 994.0)
    assert culprits(seen, RANKS, 1000.0) == [2]
    assert rows(seen, RANKS, 1000.0, [2])[1].endswith("<-- here (no report for 6 s)")
    seen[2] = Seen(seen[2].report._replace(shown=True), 994.0)  # it has written its stacks since
    assert culprits(seen, RANKS, 1000.0) == []


def test_a_collective_needs_those_that_are_not_in_it():
    seen = table({2: at("forward", "F0.0"), 6: at("data")}, at("vote", inside="world vote"))
    assert waits_for(3, seen, RANKS) == [2, 6]
    assert culprits(seen, RANKS, 1000.0) == [2, 6]


def test_a_rank_that_is_not_heard_of_is_a_culprit():
    seen = table({}, at("receive", "B1.0", peer=1))
    seen[6] = Seen(at("receive", "F0.0", peer=0), 980.0)
    assert culprits(seen, RANKS, 1000.0) == [6]
    assert "(no report for 20 s)" in rows(seen, RANKS, 1000.0, [6])[1]
    seen[6] = Seen(at("", leaves=True), 980.0)
    assert not RANKS.silent(seen[6], 1000.0)


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (at("forward", "F2.0"), "F2.0"),
        (at("receive", "B3.1", peer=1), "waits for B3.1"),
        (at("backward", "B2.0", inside="tensor all_reduce"), "B2.0, in all_reduce (tensor)"),
        (at("reduce", inside="data all_reduce"), "reduce, in all_reduce (data)"),
        (at("data"), "data"),
        (Report("saving", 3, "", "", None, "", "", 1.0), "saving"),
        (Report("validation", 3, "forward", "F0.0", None, "", "", 1.0), "validation: F0.0"),
    ],
)
def test_what_a_rank_does_in_words(report, text):
    assert describe(report) == text


def test_a_slow_rank_is_compared_with_those_that_do_the_same():
    usual = {rank: 1.0 if rank < 4 else 3.0 for rank in range(8)}  # the last stage has more to do
    assert slow_ranks(usual, RANKS.grid, 1.3) == []
    assert slow_ranks(usual | {2: 1.25}, RANKS.grid, 1.3) == []
    assert slow_ranks(usual | {2: 1.5, 7: 6.0}, RANKS.grid, 1.3) == [(7, 2.0), (2, 1.5)]
    assert slow_ranks({0: 1.0, 1: 1.6}, training_grid(data=2), 1.3) == [(1, 1.6)]
    assert slow_ranks({0: 1.0, 1: 9.0}, training_grid(pipeline=2), 1.3) == []


def test_many_ranks_report_less_often():
    assert RANKS.beat_s == 1.0
    assert Ranks(training_grid(tensor=8, pipeline=8, data=48), []).beat_s == 12.0
