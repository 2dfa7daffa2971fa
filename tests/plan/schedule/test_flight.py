"""What a rank holds at once: that of every moment of its order, in few."""

import itertools

import pytest

from ptdmpi.config.choices import SCHEDULES
from ptdmpi.config.legality import chunk_rule
from ptdmpi.plan.schedule.flight import RankOrder, fullest, fullest_alike
from ptdmpi.plan.schedule.held import held
from ptdmpi.plan.schedule.ops import ACTIVATIONS
from ptdmpi.plan.schedule.orders import KINDS, build

CASES = [
    (kind, p, v, m)
    for kind in SCHEDULES
    for p, v in ((1, 1), (2, 1), (4, 1), (1, 3), (2, 2), (4, 3), (5, 2))
    for m in (1, 2, 3, 4, 7, 8, 12, 13, 29, 41)
    if not chunk_rule(kind, v).broken
]


def exceeds(one, other):
    return all(a >= b for a, b in zip(one.held, other.held, strict=True))


@pytest.mark.parametrize(("kind", "p", "v", "m"), CASES)
def test_the_fullest_moment_of_any_sizes_is_among_them(kind, p, v, m):
    """Walked op by op with sizes of each stage, however long the step is."""
    for rank, order in enumerate(build(kind, p, v, m).orders):
        flight = fullest(RankOrder(kind, p, v, m, rank))
        for seed in (1, 2, 3):
            keeps = {
                store: 1 + (31 + len(store[0])) ** seed * (store[1] + 1) % 97
                for store in flight.stores
            }
            works = {
                (name, stage): 17**seed * (stage + len(name)) % 31
                for _, stage in flight.stores
                for name in ("backward", "weights")
            }
            # what I trades is part of what it needs
            for _, stage in flight.stores:
                own = [amount for store, amount in keeps.items() if store[1] == stage]
                works["inputs", stage] = max(own) + 5 * stage
            peak = max(
                moment.during
                for moment in held(
                    order,
                    lambda *store, keeps=keeps: keeps[store],
                    lambda *working, works=works: works[working],
                )
            )
            assert peak == max(
                sum(n * keeps[store] for n, store in zip(one.held, flight.stores, strict=True))
                + works.get(one.working, 0)
                for one in flight.moments
            )


@pytest.mark.parametrize(
    ("kind", "p", "v", "m"), [case for case in CASES if KINDS[case[0]].earlier_holds_more]
)
def test_an_earlier_rank_holds_no_less(kind, p, v, m):
    """What `MemoryModel.distinct_ranks` rests on, as the table says it."""
    for rank in range(1, p):
        before, here = (fullest(RankOrder(kind, p, v, m, r)) for r in (rank - 1, rank))
        chunk = {stage: at for f in (before, here) for at, (_, stage) in enumerate(f.stores)}
        for one in here.moments:
            assert any(
                chunk[other.working[1]] == chunk[one.working[1]] and exceeds(other, one)
                for other in before.moments
            )


@pytest.mark.parametrize(("kind", "p", "v", "m"), [case for case in CASES if case[2] > 1])
def test_stages_of_equal_sizes_may_be_counted_together(kind, p, v, m):
    """Chunks 0 and 2 on are alike, chunk 1 is not."""
    alike = tuple(int(chunk == 1) for chunk in range(v))
    for rank in range(p):
        flight = fullest(RankOrder(kind, p, v, m, rank))
        short = fullest_alike(RankOrder(kind, p, v, m, rank), alike)
        assert len(short.moments) <= len(flight.moments)
        for keeps, works in (((5, 3), (2, 9, 0)), ((1, 40), (7, 1, 0)), ((4, 4), (0, 0, 0))):
            stages = dict.fromkeys(stage for _, stage in flight.stores)
            like = dict(zip(stages, alike, strict=True))
            apart = max(
                sum(n * keeps[like[s]] for n, (_, s) in zip(one.held, flight.stores, strict=True))
                + works[like.get(one.working[1], -1)]
                for one in flight.moments
            )
            assert apart == max(
                sum(n * keeps[sort] for n, (_, sort) in zip(one.held, short.stores, strict=True))
                + works[one.working[1]]
                for one in short.moments
            )


@pytest.mark.parametrize(("kind", "p", "v", "m"), CASES)
def test_the_most_in_all_chunks_is_that_of_the_schedule(kind, p, v, m):
    peaks = build(kind, p, v, m).peak_activations()
    for rank in range(p):
        flight = fullest(RankOrder(kind, p, v, m, rank))
        counted = [inventory == ACTIVATIONS for inventory, _ in flight.stores]
        most = max(sum(itertools.compress(one.held, counted)) for one in flight.moments)
        assert most == peaks[rank]


@pytest.mark.parametrize(("kind", "p", "v", "m"), CASES)
def test_forwards_ahead_of_what_frees_are_not_overcounted(kind, p, v, m):
    """What a search refuses layouts by: exact but for phantoms, and where nothing is known."""
    for rank, order in enumerate(build(kind, p, v, m).orders):
        forwards = [*itertools.takewhile(lambda op: not op.row.frees, order)]
        ahead = KINDS[kind].ahead(rank, p, v, m)
        assert ahead <= len(forwards)
        if kind == "gpipe" or (kind in ("1f1b", "interleaved") and m % p == 0):
            assert ahead == len(forwards)


def test_validation_keeps_nothing():
    """Each forward's activations go with it."""
    found = fullest(RankOrder("forward", 2, 2, 5, 0)).moments
    assert sorted(one.held for one in found) == [(0, 1), (1, 0)]
