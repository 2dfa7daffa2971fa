"""The grid is a bijection, and its groups are what the axes say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptdmpi.config import InputError
from ptdmpi.plan.layout.grid import Grid, training_grid

NAMES = ("tensor_slice", "shard", "replicate", "pipeline", "context_shard", "context_replicate")
NAMES += ("context_expert", "data_expert", "tensor_expert")
GRIDS = st.permutations(NAMES).flatmap(
    lambda names: st.builds(
        lambda sizes: Grid(dict(zip(names, sizes, strict=False))),
        st.lists(st.integers(1, 3), min_size=1, max_size=6),
    )
)


@given(GRIDS)
def test_ranks_and_coordinates_are_a_bijection(grid):
    places = [grid.coordinates(rank) for rank in range(grid.size)]
    assert len({tuple(place.items()) for place in places}) == grid.size
    assert [grid.rank(place) for place in places] == list(range(grid.size))


@given(GRIDS)
def test_groups_partition_the_ranks(grid):
    for name in grid.groups:
        if name == "ends":  # not all ranks are at an end
            continue
        groups = {grid.members(rank, name) for rank in range(grid.size)}
        assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
        assert all(sorted(group) == list(group) for group in groups)
    for axis in grid.axes:
        for rank in range(grid.size):
            group = grid.group(rank, axis)
            assert len(group) == grid[axis]
            assert group[grid.coordinates(rank)[axis]] == rank


@given(GRIDS)
def test_replicas_hold_the_same_part_and_all_parts_are_the_model(grid):
    held = [grid.part(grid.coordinates(rank)) for rank in range(grid.size)]
    assert set(held) == grid.parts
    for rank in range(grid.size):
        same = tuple(peer for peer in range(grid.size) if held[peer] == held[rank])
        assert grid.members(rank, "replicas") == same
        assert grid.members(rank, grid.same_as("replicas")) == same


def test_tensor_varies_fastest_then_data_then_pipeline():
    grid = training_grid(tensor=2, pipeline=2, data=3)
    context = ("context_expert", "context_shard", "context_replicate")
    data = ("data_expert", "shard", "replicate")
    tensor = ("tensor_expert", "tensor_slice")
    assert grid.axes == (*tensor, *context, *data, "pipeline") and grid.data_size == 3
    here = dict.fromkeys(grid.axes, 0)
    assert grid.coordinates(1) == {**here, "tensor_slice": 1}
    assert grid.coordinates(2) == {**here, "replicate": 1}
    assert grid.coordinates(6) == {**here, "pipeline": 1}
    assert grid.members(7, "tensor") == (6, 7)
    assert grid.members(7, "data") == grid.group(7, "replicate") == (7, 9, 11)
    assert grid.group(7, "pipeline") == (1, 7)
    assert grid.group(7, "pipeline", "tensor_slice") == (0, 1, 6, 7)


def test_neighbours_on_the_data_axis_share_out_state_and_groups_of_them_copy_it():
    grid = training_grid(tensor=2, data=4, shards=2)
    assert [grid.members(0, group) for group in ("shard", "replicate", "data")] == [
        (0, 2),
        (0, 4),
        (0, 2, 4, 6),
    ]
    assert grid.members(0, "replicas") == (0, 4) and len(grid.parts) == 4
    assert grid.same_as("data") == "data" and grid.same_as("replicas") == "replicate"
    with pytest.raises(ValueError, match="3 shards do not divide 4 data ranks"):
        training_grid(data=4, shards=3)


def test_context_ranks_are_among_those_that_shard_the_state():
    def members(shards: int) -> list[tuple[int, ...]]:
        grid = training_grid(data=2, shards=shards, context=4)
        return [grid.members(5, name) for name in ("shards", "context", "data", "replicas")]

    context, data = (4, 5, 6, 7), (1, 5)
    assert members(1) == [(5,), context, data, tuple(range(8))]
    assert members(2) == [(4, 5), context, data, (1, 3, 5, 7)]
    assert members(4) == [context, context, data, data]
    assert members(8) == [tuple(range(8)), context, data, (5,)]
    assert training_grid(shards=2, context=2).same_as("shards") == "context_shard"
    assert training_grid(shards=2, context=2).called("context_shard") == "context"
    with pytest.raises(ValueError, match="3 shards do not divide 3 data ranks of 2 context ranks"):
        training_grid(data=3, shards=3, context=2)


def test_neighbours_hold_different_experts_and_shards_are_among_those_with_the_same():
    def members(rank: int, **sizes: int) -> list[tuple[int, ...]]:
        grid = training_grid(**sizes)
        return [grid.members(rank, name) for name in ("expert", "shards", "replicas", "losses")]

    everybody = tuple(range(8))
    assert members(5, data=8, expert=2) == [(4, 5), (5,), (1, 3, 5, 7), everybody]
    assert members(5, data=8, expert=2, shards=2) == [(4, 5), (5, 7), (1, 5), everybody]
    assert members(5, data=2, context=4, expert=2) == [(4, 5), (5,), (1, 3, 5, 7), everybody]
    assert members(5, data=2, context=4, expert=8) == [everybody, (5,), (5,), everybody]
    assert members(5, data=4, context=2, expert=4, shards=2) == [
        (4, 5, 6, 7),
        (1, 5),
        (5,),
        everybody,
    ]
    assert members(5, tensor=2, data=2, pipeline=2, expert=2)[0] == (5, 7)
    assert training_grid(data=2, expert=2).called("data_expert") == "data"
    with pytest.raises(ValueError, match="3 groups of experts do not divide 4 data ranks"):
        training_grid(data=4, expert=3)


def test_ends_are_the_first_and_the_last_of_a_pipeline():
    grid = training_grid(tensor=2, pipeline=3)
    assert [grid.members(rank, "ends") for rank in (0, 2, 5)] == [(0, 4), (), (1, 5)]
    assert training_grid(tensor=2).members(1, "ends") == ()


def test_a_group_that_has_the_ranks_of_an_axis_names_it():
    assert training_grid(tensor=2, data=2).same_as("replicas") == "replicate"
    assert Grid({"replicate": 1, "new": 2}).same_as("replicas") == "new"
    assert Grid({"replicate": 2, "new": 2}).same_as("replicas") == "replicas"
    assert Grid({"tensor_slice": 2}).same_as("replicas") == "replicas"
    assert training_grid(tensor=2).same_as("tensor") == "tensor_slice"


def test_what_is_outside_the_grid_is_refused():
    grid = training_grid(tensor=2, pipeline=2)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match="outside"):
            grid.coordinates(rank)
    with pytest.raises(ValueError, match="outside"):
        grid.rank({"tensor_slice": 0, "data": 1, "pipeline": 0})
    with pytest.raises(ValueError, match="outside"):
        grid.rank({"tensor_slice": 0})
    with pytest.raises(
        ValueError, match='"size" is not an axis: tensor_expert, tensor_slice, context_expert, cont'
    ):
        grid.group(0, "size")
    with pytest.raises(ValueError, match='"experts" is not an axis'):
        training_grid(experts=2)
    with pytest.raises(InputError, match="data parallel size 0"):
        Grid({"data": 0})
