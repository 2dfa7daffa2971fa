"""Who takes which place after a loss: everyone who can stay stays, holes are filled well."""

import itertools

import pytest

from ptdmpi.plan.layout.grid import Coordinates, Grid, training_grid
from ptdmpi.plan.layout.seats import seats, widest, widest_data_size


def _held(grid: Grid, lost: set[int], spare: int = 0) -> list[Coordinates | None]:
    """Where the survivors of a grid and its spare ranks stood, in the order of their ranks."""
    living = [grid.coordinates(rank) for rank in range(grid.size) if rank not in lost]
    return [*living, *[None] * spare]


@pytest.mark.parametrize(
    ("ranks", "model_ranks", "most", "sequences", "wanted"),
    [
        (7, 2, 4, 8, 2),  # three replicas have room, but 3 does not divide 8
        (7, 2, 4, 12, 3),
        (9, 2, 4, 8, 4),  # not more than the undisturbed run had
        (4, 4, 2, 8, 1),
        (3, 4, 2, 8, 0),
    ],
)
def test_widest_data_size(ranks, model_ranks, most, sequences, wanted):
    assert widest_data_size(ranks, model_ranks, most, sequences) == wanted


@pytest.mark.parametrize(
    ("data", "shards", "ranks", "wanted"),
    [
        (4, 1, 3, (1, 2)),  # 3 does not divide 8
        (4, 2, 3, (2, 1)),  # a group of two goes on, the other one is gone
        (4, 4, 3, (2, 1)),  # cut into fewer
        (4, 2, 1, (1, 1)),
        (4, 4, 4, (4, 1)),  # a spare one fills the hole
        (4, 2, 0, None),
    ],
)
def test_copies_give_way_before_shards_do(data, shards, ranks, wanted):
    grid = training_grid(data, shards)
    found = widest(grid, ranks, grid, 8)
    assert (found and (found["shard"], found["replicate"])) == wanted


@pytest.mark.parametrize(
    ("expert", "shards", "ranks", "wanted"),
    [
        (2, 1, 7, (1, 2)),  # of 4 copies of two ranks, 3 do not divide the batch
        (2, 4, 5, (2, 1)),
        (4, 1, 5, (1, 1)),
        (4, 1, 3, None),  # an expert is on no other rank
    ],
)
def test_experts_stay_on_as_many_ranks(expert, shards, ranks, wanted):
    grid = training_grid(data=8, shards=shards, expert=expert)
    found = widest(grid, ranks, grid, 8)
    assert (found and (found["shard"], found["replicate"])) == wanted
    assert found is None or found["data_expert"] == expert


def test_a_start_fills_the_grid_in_order():
    grid = training_grid(tensor=2, pipeline=2, data=2)
    nodes = [0, 0, 0, 3, 3, 3, 6, 6, 6]
    assert seats(grid, [None] * 9, nodes) == list(range(8))


def test_a_spare_rank_takes_the_lost_ones_place_and_nobody_moves():
    grid = training_grid(tensor=2, pipeline=2, data=2)
    # rank 2 is lost: ranks 3 to 7 are survivors 2 to 6; spare ones are 7 and 8, 8 on its node
    nodes = [0, 0, 0, 4, 4, 4, 4, 4, 0]
    assert seats(grid, _held(grid, {2}, spare=2), nodes) == [0, 1, 8, 2, 3, 4, 5, 6]


def test_the_replica_that_lost_least_goes_on():
    grid = training_grid(tensor=2, data=3)  # replicas 0 1, 2 3, 4 5; ranks 0 and 1 are lost, and 4
    order = seats(training_grid(tensor=2), _held(grid, {0, 1, 4}), [0, 0, 0])
    assert order == [0, 1]  # survivors 0 and 1 are ranks 2 and 3


def test_a_hole_is_filled_by_a_rank_that_holds_its_state():
    grid = training_grid(
        tensor=2, data=3
    )  # ranks 1 and 2 are lost: 0 of replica 0, 3 of replica 1, 4 5 remain
    order = seats(training_grid(tensor=2, data=2), _held(grid, {1, 2}), [0, 0, 0, 0])
    assert order == [0, 1, 2, 3]  # survivor 1 is rank 3: it holds tensor part 1


@pytest.mark.parametrize("size", [(1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 2)])
def test_every_loss_that_leaves_room_seats_everyone_once(size):
    tensor, pipeline, data = size
    grid = training_grid(tensor=tensor, pipeline=pipeline, data=data)
    model_ranks = tensor * pipeline
    for count in range(1, grid.size - model_ranks + 1):
        for lost in itertools.combinations(range(grid.size), count):
            held = _held(grid, set(lost))
            data = widest_data_size(len(held), model_ranks, grid.data_size, 12)
            smaller = grid.resized("replicate", data)
            order = seats(smaller, held, [0] * len(held))
            assert len(set(order)) == smaller.size
            whole = [
                d
                for d in range(grid.data_size)
                if not {rank for rank in lost if grid.coordinates(rank)["replicate"] == d}
            ]
            stay = sum(
                grid.part(held[one]) == grid.part(smaller.coordinates(i))
                for i, one in enumerate(order)
            )
            assert stay >= min(len(whole), data) * model_ranks
