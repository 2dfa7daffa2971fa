"""Where losses and gradients are summed is data: an axis that cuts the sequence costs its row, and
a parameter with a reduction group of its own one word of its declaration."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from ptdmpi.checkpoint.share import share
from ptdmpi.comm.world import World
from ptdmpi.config import SharedInputError
from ptdmpi.engine.engine import Engine
from ptdmpi.model.parameters import Declaration, declare
from ptdmpi.model.stage import Stage
from ptdmpi.plan.layout.grid import AXES, Axis, training_grid
from ptdmpi.train.live import Account, routes
from tests._configs import layout, small
from tests._engines import VOCAB_SIZE, build, microbatches, steps_of
from tests.parallel import parallel

ROW = "ptdmpi.plan.layout.grid.AXES"
SEQUENCE = {**AXES, "halves": Axis(cuts_sequence=True)}
EXPERTS = {**AXES, "experts": Axis(cuts_state=True, other_parameters=True, reads_samples=True)}
HIDDEN = 32


def own_positions(engine: Engine, step: int) -> list:
    """The microbatches at this rank's positions."""
    batches = microbatches(engine.config, step, engine.axes["data"].rank)
    return [batch.at(engine.context.positions) for batch in batches]


@parallel(ranks=[2, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_axis_that_cuts_the_sequence(comm, zero):
    """It joins the context group: each rank has its positions; losses, their numbers, and gradients
    are summed over both."""
    world = World(comm)
    data = comm.size // 2
    changes = {**layout(d=data), "parallel.zero": zero}
    with patch(ROW, SEQUENCE):
        sizes = {"data": data, "halves": 2, "shards": data if zero else 1}
        engine = Engine(small(changes, data), world.split(training_grid(**sizes)), VOCAB_SIZE)
        assert engine.axes["losses"].size == comm.size and engine.axes["data"].size == data
        assert engine.axes["context"].size == 2
        found = [engine.step(k, own_positions(engine, k)) for k in range(2)]
    part = world.first(data)
    if part is not None:
        for here, alone in zip(found, steps_of(build(part, changes), 2), strict=True):
            assert here.loss == pytest.approx(alone.loss, rel=1e-6)
            assert here.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
    comm.Barrier()


@parallel(ranks=[2])
def test_a_method_that_knows_the_data_axis_alone_is_refused(comm):
    with patch(ROW, SEQUENCE):
        axes = World(comm).split(training_grid(halves=2))
        changes = {"run.reproducible": True}
        with pytest.raises(SharedInputError, match='over other ranks, too; legal here: "all_r'):
            Engine(small(changes), axes, VOCAB_SIZE)


@contextmanager
def gains(name: str, apart: tuple[str, ...]) -> Iterator[None]:
    """The output of layer 0 is multiplied by a parameter that no description has."""
    made = Stage.__init__

    def with_gain(stage: Stage, *given, **named) -> None:
        made(stage, *given, **named)
        block = stage.layers["0"]
        gain = declare(stage.axis.size, (HIDDEN,), "ones", shared_gradient=True, apart=apart)
        block.register_parameter(name, gain)
        block.register_forward_hook(lambda module, given, y: y * getattr(module, name))

    with patch.object(Stage, "__init__", with_gain):
        yield


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """What this rank updates with, by name."""
    found = {piece.name: piece.values.clone() for piece in engine.state.gradients()}
    return {name: values.double() for name, values in found.items()}


@parallel(ranks=[2])
def test_a_parameter_with_a_reduction_group_of_its_own(comm):
    """Two ranks read other samples and have a gain each, under names of their own."""
    with patch(ROW, EXPERTS):
        grid = training_grid(experts=2)
        config = small({**layout(d=2), "optimizer.clip_norm": 1e9}, 2)

        def engine_with(name: str, apart: tuple[str, ...]) -> Engine:
            with gains(name, apart):
                return Engine(config, World(comm).split(grid), VOCAB_SIZE)

        engine = engine_with(f"gain{comm.rank}", ("experts",))
        own = f"layers.0.gain{comm.rank}"
        assert engine.axes["data"].size == 2 and [u.apart for u in engine.buffer.units] == [
            (),
            ("experts",),
        ]
        (result,) = steps_of(engine, 1)
        mine = gradients(engine)

        summed = engine_with("gain", ())
        steps_of(summed, 1)
        both = gradients(summed)
        total = both.pop("layers.0.gain")
        every = comm.allgather(mine.pop(own))
        assert not torch.equal(*every)
        assert torch.allclose(sum(every), total, rtol=1e-5, atol=1e-9)
        assert all(torch.equal(mine[name], both[name]) for name in both)
        # the norm counts both gains, and everything else once
        squares = sum(float(values.square().sum()) for values in (*mine.values(), *every))
        assert result.grad_norm == pytest.approx(math.sqrt(squares), rel=1e-5)
        # both gains are in the checkpoint, each written once and by its own rank
        written = [(part.kind, part.name, part.box) for part in share(engine.state, engine.axes)]
        of_gains = [one[1] for one in written if "gain" in one[1]]
        assert set(of_gains) == {own} and len(of_gains) == 3
        others = comm.allgather({str(one) for one in written})
        assert not others[0] & others[1]
        # nobody else can hand over this rank's state
        accounts = [Account(grid.coordinates(rank), step=1) for rank in (0, 1)]
        assert [tuple(way) for way in routes(accounts, grid, [1, 0], 1)] == [(0, 1), (1, 0)]


@parallel(ranks=[4])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_its_state_is_sharded_among_those_that_have_it(comm, zero):
    """Two experts, each on two ranks that share out its state: the gradients of two ranks alone."""
    with patch(ROW, EXPERTS):
        config = small({**layout(d=4), "parallel.zero": zero}, 4)
        with gains(f"gain{comm.rank // 2}", ("experts",)):
            grid = training_grid(data=2, shards=2, experts=2)
            engine = Engine(config, World(comm).split(grid), VOCAB_SIZE)
        steps_of(engine, 1)
        mine = gradients(engine)
        with gains(f"gain{comm.rank // 2}", ("experts",)):
            whole = small(layout(d=4), 4)
            grid = training_grid(data=2, experts=2)
            unsharded = Engine(whole, World(comm).split(grid), VOCAB_SIZE)
        steps_of(unsharded, 1)
        expected = gradients(unsharded)
    held = comm.allgather({name: values.numel() for name, values in mine.items()})
    first = comm.rank // 2 * 2
    for name, values in expected.items():
        assert held[first].get(name, 0) + held[first + 1].get(name, 0) == values.numel()
        if name in mine:
            begin = 0 if comm.rank == first else values.numel() - mine[name].numel()
            part = values.flatten()[begin : begin + mine[name].numel()]
            assert torch.allclose(mine[name].flatten(), part, rtol=1e-4, atol=1e-7)


def test_nothing_is_apart_along_an_axis_of_replicas():
    with pytest.raises(ValueError, match='"replicate" does not cut the state'):
        Declaration((2,), None, "zeros", False, apart=("replicate",))
