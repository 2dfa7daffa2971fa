"""The live state that survives a loss, and its way to the ranks of the next attempt."""

import gc
from unittest.mock import patch

import pytest

from ptdmpi.comm.world import World
from ptdmpi.model.sharded import Walk
from ptdmpi.plan.layout.grid import Grid, training_grid
from ptdmpi.train.checks import checked
from ptdmpi.train.live import Account, live_step, routes, routes_apart
from ptdmpi.train.loop import Loop
from ptdmpi.train.recover import Survivors
from ptdmpi.watch.requests import StopRequest
from tests._runs import configuration, corpus
from tests.comm._wires import Unfinished, out_of_luck, registered
from tests.parallel import parallel


def _accounts(grid: Grid, steps: dict[int, int], spare: int = 0) -> list[Account]:
    """Accounts of the ranks of `grid` that are keys of `steps` (done so far); then spare ones."""
    living = [Account(place=grid.coordinates(rank), step=step) for rank, step in steps.items()]
    return [*living, *[Account()] * spare]


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ({0: 7, 1: 7, 2: 7, 3: 7}, 7),
        ({0: 8, 1: 8, 2: 7, 3: 7}, 8),  # replica 0 has updated, replica 1 not yet
        ({0: 8, 1: 7, 2: 7, 3: 7}, 7),  # after step 8 nobody has tensor part 1
        ({0: 8, 3: 7}, None),  # each part is there, but not after the same step
        ({0: 8, 3: 8}, 8),
        ({0: 8, 2: 8}, None),  # tensor part 1 is lost
        ({}, None),
    ],
)
def test_live_state_is_of_one_step_and_whole(steps, wanted):
    grid = training_grid(tensor=2, data=2)  # ranks 0 and 2 hold tensor part 0, ranks 1 and 3 part 1
    assert live_step(_accounts(grid, steps, spare=1), grid) == wanted


def test_a_state_that_was_being_changed_is_none():
    grid = training_grid(data=2)
    accounts = [Account(place=grid.coordinates(0), step=None), Account()]
    assert live_step(accounts, grid) is None


def test_ranks_keep_what_they_hold_and_holders_share_the_work():
    before, after = training_grid(pipeline=2, data=3), training_grid(pipeline=2, data=3)
    # ranks 0 1 2 hold stage 0 and 3 4 5 stage 1; rank 5 is lost, rank 2 lags; a spare one comes
    accounts = _accounts(before, {0: 9, 1: 9, 2: 8, 3: 9, 4: 9}, spare=1)
    ways = routes(accounts, after, [0, 1, 2, 3, 4, 5], 9)
    assert ways[:2] == [(0, 0), (1, 1)] and ways[3:5] == [(3, 3), (4, 4)]
    assert ways[2] in ((0, 2), (1, 2)) and ways[5] in ((3, 5), (4, 5))
    # three ranks without state get it from two different ones
    fresh = [*accounts, *[Account()] * 3]
    sources = {source for source, target in routes(fresh, after, [5, 6, 7, 3, 4, 8], 9)[:3]}
    assert sources == {0, 1}


def test_of_replicas_that_differ_whole_ones_go_on():
    """t = 2, d = 4: ranks 2 r and 2 r + 1 are replica r. Rank 3 is lost, and with it replica 1; one
    half of replica 3 has updated."""
    before = training_grid(tensor=2, data=4)
    steps = {0: 5, 1: 5, 2: 5, 4: 5, 5: 5, 6: 5, 7: 6}
    accounts = _accounts(before, steps)  # living ranks 0 to 6
    after = training_grid(tensor=2, data=3)
    assert live_step(accounts, after, apart=True) == 5
    assert live_step(_accounts(before, {**steps, 6: 6, 1: 6, 0: 6}), after, apart=True) == 6
    # the half replicas hand nothing over: replica 0 stays, 2 moves, and what is left is a copy
    ways = routes_apart(accounts, after, [0, 1, 2, 5, 3, 4], 5)
    assert ways == [(0, 0), (1, 1), (0, 2), (1, 5), (3, 3), (4, 4)]
    assert live_step(_accounts(before, {0: 5, 3: 5}), after, apart=True) is None
    assert live_step(_accounts(before, {0: 5, 3: 5}), after) == 5


@parallel(ranks=[2])
def test_what_is_under_way_outlives_the_loop(comm, tmp_path):
    """Weights are gathered and gradients reduced by a wire that takes its time when a step fails:
    it may still write into their memory when the loop and its engine are gone."""
    world = World(comm)
    world.on_root(lambda: corpus(tmp_path))
    changes = {"comm.wire": "slow", "parallel.zero": 3, "run.steps": 2}
    failing = patch.object(Walk, "backward", out_of_luck())
    with StopRequest() as signals, registered(), failing:
        config = world.on_root(lambda: checked(configuration(tmp_path, changes), world.size))
        survivors = Survivors(config, world, signals)
        survivors.loop = Loop(config, world, signals)
        Unfinished.dropped = 0
        with pytest.raises(RuntimeError, match="luck"):
            survivors.loop.run()
        survivors._put_away()
        world.last_words = print  # else it keeps the heartbeat, and by this the groups
        gc.collect()
    assert Unfinished.dropped == 0
    left = [begun for groups in survivors.stranded[1:] for queue in groups for begun in queue]
    assert {begun.name for begun in left} == {"all_gather", "reduce_scatter"}
    for begun in left:
        begun.wait()
