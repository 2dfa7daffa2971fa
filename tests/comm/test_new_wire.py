"""A new wire costs one class and one entry: with these it is named, split and trained on."""

import gc
from unittest.mock import patch

import pytest
import torch

from ptdmpi.comm.wires import Wire, wire_named
from ptdmpi.comm.world import World
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.engine.engine import Engine
from ptdmpi.model.sharded import Walk
from ptdmpi.plan.layout.grid import grid_of
from tests._configs import layout, small
from tests._engines import VOCAB_SIZE, steps_of
from tests.comm._wires import (
    FastCommunicator,
    LateClock,
    Unfinished,
    out_of_luck,
    registered,
)
from tests.parallel import parallel


def test_names():
    assert wire_named("auto").kind is wire_named("mpi").kind
    with pytest.raises(InputError) as refused:
        small({"comm.wire": "fast"})
    assert (
        str(refused.value)
        == 'comm.wire = "fast": no such transport; legal: "auto", "mpi", "nccl", "torch"'
    )
    with registered():
        assert small({"comm.wire": "fast"}).comm.wire == "fast"
        assert wire_named("fast").kind is FastCommunicator


def _engine(comm, changes: dict, wire: Wire) -> Engine:
    world = World(comm)
    config = small(changes, world.size)
    return Engine(config, world.split(grid_of(config), wire), VOCAB_SIZE)


@pytest.mark.cases(2)
@parallel(ranks=[2, 4])
@pytest.mark.parametrize("changes", [layout(p=2), layout(t=2)])
def test_trained_on(comm, changes):
    """The same losses as on `mpi`, up to the order of sums; by a clock that runs behind."""
    changes = {**changes, "parallel.data": comm.size // 2, "parallel.sequence_parallel": True}
    if changes["parallel.tensor"] == 1:
        del changes["parallel.sequence_parallel"]
    clock = LateClock()
    with registered():
        engine = _engine(comm, changes, wire_named("fast", clock=clock))
    assert all(type(group) is FastCommunicator for group in _data_plane(engine))
    assert not engine.axes.exact and engine.axes.world.exact
    results = steps_of(engine, 3)
    expected = steps_of(_engine(comm, changes, wire_named("mpi")), 3)
    for found, known in zip(results, expected, strict=True):
        assert found.loss == pytest.approx(known.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(known.grad_norm, rel=1e-5)
    # one wait for the device in each step; its times are whole then
    assert clock.settles == 3
    assert all(result.compute_s > 0 for result in results)
    waits = changes["parallel.tensor"] > 1
    assert all((result.inside_s["tensor"] > 0) == waits for result in results)
    clock.settle()
    kinds = {span.kind for result in results for span in result.spans}
    assert {"forward", "backward", "reduce", "optimizer"} <= kinds


@parallel(ranks=[2])
@pytest.mark.parametrize(
    ("zero", "kinds"), [(2, {"reduce_scatter"}), (3, {"all_gather", "reduce_scatter"})]
)
def test_a_step_that_is_broken_off_with_collectives_under_way(comm, zero, kinds):
    """Sharded, and in the midst of the backward pass. What was begun keeps its memory until it is
    over, and the next steps have the bits of a run in which nothing has failed."""
    changes = {**layout(d=2), "parallel.zero": zero, "batch.micro_size": 4}
    expected = steps_of(_engine(comm, changes, wire_named("mpi")), 2)
    with registered():
        engine = _engine(comm, changes, wire_named("slow"))
    group = engine.axes["shard"]
    Unfinished.dropped = 0
    with patch.object(Walk, "backward", out_of_luck()), pytest.raises(RuntimeError, match="luck"):
        steps_of(engine, 1)
    gc.collect()
    assert {begun.name for begun in group.under_way} == kinds
    found = steps_of(engine, 2)
    gc.collect()
    assert Unfinished.dropped == 0
    for one, known in zip(found, expected, strict=True):
        assert (one.loss, one.grad_norm) == (known.loss, known.grad_norm)
    # nobody but the wire wants what is left of the step that was broken off
    assert {begun.name for begun in group.under_way} == {"reduce_scatter"}
    for begun in list(group.under_way):
        begun.wait()
    assert not any(one.under_way for one in engine.axes.groups.values())


def _data_plane(engine: Engine) -> list:
    return [group for name, group in engine.axes.groups.items() if name != "world"]


@parallel(ranks=[2])
def test_who_needs_exact_sums_asks(comm):
    changes = {**layout(d=2), "run.reproducible": True}
    with registered(), pytest.raises(SharedInputError) as refused:
        _engine(comm, changes, wire_named("fast"))
    (line,) = str(refused.value).splitlines()
    assert "run.reproducible = true needs sums in ascending rank order" in line
    assert _engine(comm, changes, wire_named("mpi")).axes.exact


@parallel(ranks=[1])
def test_a_wire_that_is_not_exact_is_as_good_alone(comm):
    """Where nothing is summed, nothing can be summed in another order."""
    with registered():
        engine = _engine(comm, {"run.reproducible": True}, wire_named("fast"))
    assert engine.axes.exact and torch.isfinite(engine.buffer.masters[0]).all()
