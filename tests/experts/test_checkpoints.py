"""Checkpoints of models with experts go on in another layout, with what the balance remembers."""

import pytest

from ptdmpi.comm.world import World
from tests._configs import layout
from tests._engines import build, from_root
from tests.checkpoint.test_sharded import assert_whole, checkpoints, saved, sharded, stepped
from tests.experts.test_parity import MIXED
from tests.parallel import parallel


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize("balance", ["bias", "batch"])
def test_a_run_goes_on_in_another_layout(comm, tmp_path, balance):
    settings = {**MIXED, "model.balance": balance, "model.balance_coefficient": 0.02}
    alone = World(comm).first(1)
    straight = stepped(build(alone, settings), 0, 4) if alone is not None else None
    expected = from_root(comm, straight)
    world = World(comm)
    first = build(world, {**settings, **layout(t=2)})
    found = stepped(first, 0, 2)
    assert_whole(world, saved(first, tmp_path, 2))
    second = build(world, {**settings, **sharded(3, d=2)})
    progress, _ = checkpoints(second, tmp_path).resume("auto")
    assert progress is not None and progress.step == 2
    found += stepped(second, 2, 4)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-12), step
