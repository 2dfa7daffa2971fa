"""Neighbours on a graph, on every wire: MPI's own neighbourhood collective, and pairs of messages,
whose order cannot deadlock."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptdmpi.comm import pairs
from ptdmpi.engine import exchange as exchanges
from ptdmpi.plan.layout.topology import topology
from tests.comm._wires import connect
from tests.comm.test_communicator import DTYPES, each_wire, values
from tests.parallel import parallel

PROCESS = "threaded wires"  # as of the tests of communicators


def around(name: str, axis, step: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sources and destinations of this rank in a topology."""
    found = topology(name, axis.size, 1)
    return found.sources(step, axis.rank), found.destinations(step, axis.rank)


@parallel(ranks=[1, 2, 3, 8])
@each_wire
def test_neighbours_exchange(comm, wire):
    for lasting, dtype in itertools.product((True, False), DTYPES):
        exchange(connect(wire, comm), dtype, lasting)


def exchange(axis, dtype: torch.dtype, lasting: bool) -> None:
    """Several on several graphs at once, directed ones too, awaited in another order."""
    graphs = [around(name, axis, 1) for name in ("one_peer_exponential", "torus", "random")]
    made = [axis.neighbours(*graph, lasting=lasting) for graph in graphs]
    begun = []
    for i, size in enumerate([1, 5, 40000]):
        for graph in made:
            mine = values(axis.rank + i, size, dtype).view(1, -1)
            begun.append((i, size, graph, *graph.gather_begin(mine)))
    for i, size, graph, found, handle in reversed(begun):
        handle.wait()
        assert handle.done() and found.shape == (len(graph.sources), 1, size)
        for part, peer in zip(found, graph.sources, strict=True):
            assert torch.equal(part.view(-1), values(peer + i, size, dtype))
    assert axis.busy == "" and not axis.under_way
    assert made[0].gather(torch.empty(0, dtype=dtype)).shape == (len(made[0].sources), 0)


@parallel(ranks=[2, 4])
@each_wire
def test_neighbours_are_counted_and_under_way(comm, wire):
    for lasting in (True, False):
        counted(connect(wire, comm), lasting)


def counted(axis, lasting: bool) -> None:
    graph = axis.neighbours(*around("ring", axis), lasting=lasting)
    _, handle = graph.gather_begin(torch.ones(50_000, dtype=torch.float64))
    assert [one.name for one in axis.under_way] == ["neighbours"]
    while not handle.done():
        pass
    assert not axis.under_way
    handle.wait()
    peers = 1 if axis.size == 2 else 2
    assert axis.tally.sent_bytes["neighbours"] == peers * 400_000
    assert axis.tally.messages["neighbours"] == peers and axis.tally.messages["send"] == 0


@parallel(ranks=[1, 2, 4])
@each_wire
def test_all_tell_each_other_what_is_theirs(comm, wire):
    """Messages of several sizes, some of none; what is a rank's own stays where it is."""
    axis = connect(wire, comm)

    def size(source: int, target: int) -> int:
        return [0, 3, 40_000][(source + 2 * target + 1) % 3]

    def sent(source: int, target: int) -> torch.Tensor:
        return values(3 * source + target, size(source, target), torch.bfloat16)

    ranks, here = range(axis.size), axis.rank
    arriving = [torch.zeros_like(sent(peer, here)) for peer in ranks]
    exchanges.exchange(axis, [sent(here, peer) for peer in ranks], arriving)
    for peer in ranks:
        if peer == here:
            assert not arriving[peer].any()
        else:
            assert torch.equal(arriving[peer], sent(peer, here))
    assert axis.tally.messages["send"] == sum(
        peer != here and size(here, peer) > 0 for peer in ranks
    )


@parallel(ranks=[2])
@each_wire
def test_who_is_no_neighbour_is_refused(comm, wire):
    axis = connect(wire, comm)
    for peers in ([comm.rank], [2], [-1], [1 - comm.rank] * 2):
        with pytest.raises(ValueError, match="cannot be neighbours of rank"):
            axis.neighbours(peers, [])
    with pytest.raises(ValueError, match="must be contiguous"):
        axis.neighbours([], []).gather(torch.ones(2, 3).t())


def meet(size: int, sources, destinations) -> int:
    """How many rounds it takes until all messages of a graph are over where each waits for its
    other end; raises AssertionError where they never are."""
    left = {
        rank: pairs.pair_order(rank, size, sources(rank), destinations(rank))
        for rank in range(size)
    }
    rounds = 0
    while any(left.values()):
        ready = [
            (rank, peer)
            for rank, messages in left.items()
            for sends, peer in messages[:1]
            if sends and left[peer][:1] == [(False, rank)]
        ]
        assert ready, left
        for pair in ready:
            for rank in pair:
                left[rank].pop(0)
        rounds += 1
    return rounds


@settings(max_examples=100, deadline=None)
@given(
    st.integers(2, 9).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.sets(
                st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(
                    lambda m: m[0] != m[1]
                )
            ),
        )
    )
)
def test_pairs_cannot_deadlock_where_each_message_waits_for_its_other_end(graph):
    size, messages = graph

    def sources(rank: int) -> list[int]:
        return sorted(source for source, target in messages if target == rank)

    meet(
        size, sources, lambda rank: sorted(target for source, target in messages if source == rank)
    )


@pytest.mark.parametrize(
    "name", ["ring", "torus", "exponential", "one_peer_exponential", "complete"]
)
def test_pairs_wait_for_few_others(name):
    """Rounds of an exchange over 64 ranks, each of which has both ways of a pair one by one."""
    found = topology(name, 64)
    rounds = meet(64, lambda rank: found.sources(0, rank), lambda rank: found.destinations(0, rank))
    assert rounds <= 3 * found.most_neighbours
