"""A fourth axis costs an entry in a grid: what is for all axes works with one it has never seen.

The axis "new" stands at each place of the order, with size 1 and with size 2.
"""

import itertools
import math
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from ptdmpi.checkpoint.share import share
from ptdmpi.comm.world import World
from ptdmpi.engine.engine import Engine
from ptdmpi.plan.layout.grid import AXES, Axis, Grid, training_grid
from ptdmpi.plan.layout.seats import seats
from ptdmpi.train.live import Account, live_step, routes
from ptdmpi.watch import whereabouts
from ptdmpi.watch.whereabouts import Ranks, Seen, culprits, waits_for
from tests._configs import layout, small
from tests._engines import VOCAB_SIZE, build, steps_of
from tests.parallel import parallel

NEW = "new"
PLACES = range(len(AXES) + 1)
new_axis = pytest.mark.parametrize(
    ("place", "new"), [(place, new) for place in PLACES for new in (1, 2)]
)


def with_new_axis(place: int, new: int, sizes: dict[str, int]) -> Grid:
    """The axes of the trainer, and a new one before the one at `place` of their order."""
    names = [*list(AXES)[:place], NEW, *list(AXES)[place:]]
    return Grid({name: new if name == NEW else sizes.get(name, 1) for name in names})


def grids(size: int) -> Iterator[Grid]:
    """All grids of `size` ranks with a new axis of size 1 or 2."""
    some = [n for n in range(1, size + 1) if size % n == 0]
    for place, new, t, p in itertools.product(PLACES, (1, 2), some, some):
        if size % (new * t * p) == 0:
            sizes = {"tensor_slice": t, "pipeline": p, "replicate": size // (new * t * p)}
            yield with_new_axis(place, new, sizes)


@new_axis
def test_grid(place, new):
    grid = with_new_axis(place, new, {"tensor_slice": 2, "replicate": 3, "pipeline": 2})
    assert grid.axes[place] == NEW and grid.size == 12 * new
    for rank in range(grid.size):
        assert grid.rank(grid.coordinates(rank)) == rank
        assert len(grid.group(rank, NEW)) == new
        # it does not cut the model: its ranks are replicas of each other
        assert len(grid.members(rank, "replicas")) == 3 * new
        assert set(grid.group(rank, NEW)) <= set(grid.members(rank, "replicas"))
    assert len(grid.parts) == 4


@new_axis
def test_its_name_in_the_order_makes_its_size_legal(place, new):
    """The first of the two places to touch: `grid_of` hands the size to `training_grid`."""
    with pytest.raises(ValueError, match=f'"{NEW}" is not an axis'):
        training_grid(**{NEW: new})
    rows = list(AXES.items())
    rows.insert(place, (NEW, Axis()))
    with patch("ptdmpi.plan.layout.grid.AXES", dict(rows)):
        grid = training_grid(**{"tensor": 2, NEW: new})
    assert grid == with_new_axis(place, new, {"tensor_slice": 2})


@new_axis
def test_seats(place, new):
    """A spare rank takes the place of a lost one, and nobody moves; then replicas give way."""
    grid = with_new_axis(place, new, {"tensor_slice": 2, "replicate": 2, "pipeline": 2})
    lost = grid.size - 1
    held = [grid.coordinates(rank) for rank in range(grid.size) if rank != lost]
    order = seats(grid, [*held, None], [0] * grid.size)
    assert order == list(range(grid.size))
    smaller = grid.resized("replicate", 1)
    order = seats(smaller, held, [0] * len(held))
    assert len(set(order)) == smaller.size
    stay = [(held[one], smaller.coordinates(rank)) for rank, one in enumerate(order)]
    assert all(smaller.part(before) == smaller.part(after) for before, after in stay)


@new_axis
def test_live_state(place, new):
    grid = with_new_axis(place, new, {"tensor_slice": 2, "replicate": 1, "pipeline": 2})
    accounts = [Account(grid.coordinates(rank), step=7) for rank in range(grid.size)]
    assert live_step(accounts, grid) == 7
    alone = [
        Account(a.place, step=7 if a.place is not None and a.place[NEW] == 0 else 6)
        for a in accounts
    ]
    assert live_step(alone, grid) == 7  # one rank of the new axis holds the whole model
    ways = routes(alone, grid, range(grid.size), 7)
    for source, target in ways:
        assert grid.coordinates(source) == {**grid.coordinates(target), NEW: 0}
    assert live_step(alone[1:], grid) == (6 if new == 2 else None)


@new_axis
def test_whereabouts(place, new):
    """A rank that is not in a collective of the new axis holds up those that are."""
    grid = with_new_axis(place, new, {"tensor_slice": 2, "replicate": 2, "pipeline": 1})
    ranks = Ranks(grid, ["here"] * grid.size)
    inside = whereabouts.Report("training", 3, "forward", "F0.0", None, NEW, "all_reduce", 9.0)
    busy = inside._replace(axis="", collective="")
    table = {rank: Seen(inside, 0.0) for rank in range(grid.size)} | {0: Seen(busy, 0.0)}
    for rank in grid.group(0, NEW)[1:]:
        assert waits_for(rank, table, ranks) == [0]
    assert 0 in culprits(table, ranks, 1.0)
    everywhere = {rank: Seen(inside._replace(axis="replicas"), 0.0) for rank in range(grid.size)}
    everywhere[0] = Seen(busy, 0.0)
    for rank in grid.members(0, "replicas")[1:]:
        assert waits_for(rank, everywhere, ranks) == [0]


@parallel(ranks=[2, 4, 8])
def test_split(comm):
    world = World(comm)
    for grid in grids(world.size):
        axes = world.split(grid)
        assert tuple(axes.groups) == tuple(
            name for name in grid.groups if grid.members(world.rank, name)
        )
        for name, group in axes.groups.items():
            assert group.all_gather_object(world.rank) == list(grid.members(world.rank, name))
        for comm_made in world.made[2:]:  # of 80 grids: MPI libraries have a limited number
            comm_made.Free()
        del world.made[2:]


@parallel(ranks=[2, pytest.param(4, marks=pytest.mark.long), 8])
@pytest.mark.parametrize("place", PLACES)
def test_shares_of_a_checkpoint(comm, place):
    """Every element of every tensor is written by one rank, with replicas on the new axis."""
    world = World(comm)
    t, d = (1, 1) if world.size == 2 else (2, world.size // 4)
    grid = with_new_axis(place, 2, {"tensor_slice": t, "replicate": d})
    engine = Engine(small(layout(t=t, d=d), t * d), world.split(grid), VOCAB_SIZE)
    mine = [(part.kind, part.name, part.box) for part in share(engine.state, engine.axes)]
    everyone = [one for of_rank in engine.axes.world.all_gather_object(mine) for one in of_rank]
    assert len({str(one) for one in everyone}) == len(everyone)
    for name, entry in engine.buffer.entries.items():
        for kind in ("weights", "exp_avg", "exp_avg_sq"):
            boxes = [box for k, n, box in everyone if (k, n) == (kind, name)]
            assert sum(box.elements for box in boxes) == math.prod(entry.declaration.shape), (
                kind,
                name,
            )
    assert all(of_rank for of_rank in engine.axes.world.all_gather_object(len(mine)))


@pytest.mark.cases(3)
@parallel(ranks=[4])
@pytest.mark.parametrize("place", PLACES)
def test_replicas_on_the_new_axis_train_alike(comm, place):
    """Two copies of a training on two ranks of the new axis, to the bit that of one copy."""
    world = World(comm)
    grid = with_new_axis(place, 2, {"pipeline": 2})
    engine = Engine(small(layout(p=2), 2), world.split(grid), VOCAB_SIZE)
    found = [(result.loss, result.grad_norm) for result in steps_of(engine, 2)]
    part = world.first(2)
    alone = None
    if part is not None:
        alone = [(r.loss, r.grad_norm) for r in steps_of(build(part, layout(p=2)), 2)]
    assert world.control.bcast(alone) == found
