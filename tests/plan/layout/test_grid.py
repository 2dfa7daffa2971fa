"""The grid is a bijection, and its groups are what the axes say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptdmpi.config import InputError
from ptdmpi.plan.layout.grid import Coordinates, Grid

SIZES = st.integers(1, 5)
AXES = ("tensor", "pipeline", "data")


@given(SIZES, SIZES, SIZES)
def test_ranks_and_coordinates_are_a_bijection(tensor, pipeline, data):
    grid = Grid(tensor=tensor, pipeline=pipeline, data=data)
    places = [grid.coordinates(rank) for rank in range(grid.size)]
    assert grid.size == tensor * pipeline * data == len(set(places))
    assert [grid.rank(place) for place in places] == list(range(grid.size))


@given(SIZES, SIZES, SIZES)
def test_groups_of_an_axis_partition_the_ranks(tensor, pipeline, data):
    grid = Grid(tensor=tensor, pipeline=pipeline, data=data)
    for axis in AXES:
        groups = {grid.group(rank, axis) for rank in range(grid.size)}
        assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
        for rank in range(grid.size):
            group = grid.group(rank, axis)
            assert len(group) == getattr(grid, axis)
            assert group[getattr(grid.coordinates(rank), axis)] == rank


def test_tensor_varies_fastest_then_data_then_pipeline():
    grid = Grid(tensor=2, pipeline=2, data=3)
    assert grid.coordinates(1) == Coordinates(tensor=1, data=0, pipeline=0)
    assert grid.coordinates(2) == Coordinates(tensor=0, data=1, pipeline=0)
    assert grid.coordinates(6) == Coordinates(tensor=0, data=0, pipeline=1)
    assert grid.group(7, "tensor") == (6, 7)
    assert grid.group(7, "data") == (7, 9, 11)
    assert grid.group(7, "pipeline") == (1, 7)


def test_what_is_outside_the_grid_is_refused():
    grid = Grid(tensor=2, pipeline=2, data=1)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match="outside"):
            grid.coordinates(rank)
    with pytest.raises(ValueError, match="outside"):
        grid.rank(Coordinates(tensor=0, data=1, pipeline=0))
    with pytest.raises(ValueError, match="tensor, pipeline or data"):
        grid.group(0, "size")
    with pytest.raises(InputError, match="data parallel size 0"):
        Grid(tensor=1, pipeline=1, data=0)
