"""Checkpoints of replicas that differ: each of them, or their mean; for the same number of them, in
any layout, or for another method."""

import pytest
import torch

from ptdmpi.checkpoint.save import Checkpoints
from ptdmpi.comm.world import World
from ptdmpi.config import SharedInputError
from ptdmpi.engine.engine import Engine
from ptdmpi.model.state import WEIGHTS
from tests._configs import layout
from tests._engines import build, course, microbatches, whole_weights
from tests.parallel import parallel

# saved within a round: the replicas differ, and what the method keeps is not what it began with
LOCAL = {
    "data_parallel.method": "local",
    "data_parallel.local_steps": 3,
    "data_parallel.outer_momentum": 0.9,
    "data_parallel.outer_learning_rate": 0.7,
    "model.tie_embeddings": False,
    "model.layers": 2,
    "batch.micro_size": 1,
}
SAVED, LAST = 4, 7


def step(engine: Engine, first: int, last: int) -> list[tuple[float, float]]:
    rank = engine.axes["data"].rank
    results = [engine.step(k, microbatches(engine.config, k, rank)) for k in range(first, last)]
    return [(one.loss, one.grad_norm) for one in results]


def checkpoints(engine: Engine, path, **values) -> Checkpoints:
    config = engine.config.replace("checkpoint", **values)
    return Checkpoints(path, engine.state, engine.axes, course(config))


@parallel(ranks=[4], limit_s=90)
@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.long)])
def test_each_replica_goes_on_with_its_own_bits_in_any_layout(comm, tmp_path, asynchronous):
    world = World(comm)
    straight = build(world, {**LOCAL, **layout(p=2, d=2)})
    step(straight, 0, SAVED)
    saves = checkpoints(straight, tmp_path, asynchronous=asynchronous)
    saves.save(SAVED)
    saves.finish()
    expected = step(straight, SAVED, LAST)
    for sizes in ({"p": 2, "d": 2}, {"t": 2, "d": 2}):
        resumed = build(world, {**LOCAL, **layout(**sizes)})
        loads = checkpoints(resumed, tmp_path)
        progress, _ = loads.resume(str(tmp_path))
        assert progress.step == SAVED and loads.mean_of == 0
        found = step(resumed, SAVED, LAST)
        if "p" in sizes:
            assert found == expected
            assert all(
                torch.equal(straight.state.flats[i], one)
                for i, one in enumerate(resumed.state.flats)
            )
        else:
            assert torch.tensor(found).allclose(torch.tensor(expected), rtol=1e-5)
    for one in (saves, loads):
        one.close()


@pytest.mark.long
@parallel(ranks=[4], limit_s=90)
def test_the_mean_is_taken_where_replicas_are_not_wanted(comm, tmp_path):
    """By a method without any, by one rank, and, when that is allowed, by another number of them;
    and it has the bits of a checkpoint that holds the mean."""
    world = World(comm)
    engine = build(world, {**LOCAL, **layout(d=4)})
    step(engine, 0, SAVED)
    checkpoints(engine, tmp_path / "each").save(SAVED)
    average = {"data_parallel.checkpoint": "average"}
    mean = build(world, {**LOCAL, **layout(d=4), **average})
    for flat, value in zip(mean.state.flats, engine.state.flats, strict=True):
        flat.copy_(value)
    own = [flat.clone() for flat in mean.state.flats]
    checkpoints(mean, tmp_path / "mean").save(SAVED)
    assert all(map(torch.equal, mean.state.flats, own))  # saving changes nothing
    whole = sum(comm.allgather(engine.buffer.masters[0])) / 4

    plain = build(world, {**layout(d=4), "model.tie_embeddings": False, "model.layers": 2})
    for folder, of in (("each", 4), ("mean", 0)):
        loads = checkpoints(plain, tmp_path / folder)
        loads.resume("auto")
        assert loads.mean_of == of
        assert torch.equal(plain.buffer.masters[0], whole)
        again = build(world, {**LOCAL, **layout(d=4)})
        checkpoints(again, tmp_path / folder).resume("auto")
        expected = own if folder == "each" else plain.state.flats
        assert all(map(torch.equal, again.state.flats[:3], expected[:3]))

    fewer = {**LOCAL, **layout(p=2, d=2)}
    with pytest.raises(SharedInputError, match="4 replicas that differ, and this run has d = 2"):
        checkpoints(build(world, fewer), tmp_path / "each").resume("auto")
    allowed = build(world, {**fewer, **average})
    checkpoints(allowed, tmp_path / "each").resume("auto")
    loaded = whole_weights(allowed)
    expected = whole_weights(plain)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@parallel(ranks=[2])
def test_what_a_method_keeps_begins_anew_where_a_checkpoint_has_none(comm, tmp_path):
    world = World(comm)
    where = {**layout(d=2), "model.tie_embeddings": False, "model.layers": 2}
    plain = build(world, where)
    step(plain, 0, SAVED)
    checkpoints(plain, tmp_path).save(SAVED)
    engine = build(world, {**LOCAL, **layout(d=2)})
    checkpoints(engine, tmp_path).resume("auto")
    anchor = engine.state.kinds["anchor"].parts[0]
    assert torch.equal(anchor, plain.buffer.masters[0])
    assert torch.equal(anchor, engine.state.kinds[WEIGHTS].parts[0])
    assert not engine.state.kinds["outer_momentum"].parts[0].any()
