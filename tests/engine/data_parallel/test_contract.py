"""A data-parallel method is one class: a dummy whose replicas differ trains, all ranks tell the
same of it, and each replica is saved."""

import math
from unittest.mock import patch

import torch

from ptdmpi.checkpoint.share import share
from ptdmpi.comm.world import World
from ptdmpi.engine.data_parallel import METHODS
from ptdmpi.engine.data_parallel.method import DataParallel
from tests._configs import layout
from tests._engines import build, microbatches, steps_of
from tests.parallel import parallel

EVERY = 2
# untied, for a tied table adds in another order; unclipped, for clipping changes the gradients
WHERE = layout(p=2, d=2) | {"batch.micro_size": 1, "model.tie_embeddings": False}
WHERE |= {"optimizer.clip_norm": 0.0}


class Averaged(DataParallel):
    """Local steps: each replica goes its own way, and their masters are averaged every other
    step."""

    differs = ("replicate",)

    def after_update(self, step: int, skipped: bool) -> None:
        if step % EVERY == EVERY - 1:
            buffer = self.replica.buffer
            self.data.all_reduce(buffer.masters[0])
            buffer.masters[0] /= self.data.size
            buffer.refresh_weights()


def equal_replicas(engine) -> bool:
    masters = engine.axes["data"].all_gather_object(engine.buffer.masters[0])
    return all(torch.equal(masters[0], other) for other in masters)


@parallel(ranks=[4])
def test_a_method_is_one_class(comm):
    plain = build(World(comm), WHERE)
    steps_of(plain, 1)
    with patch.dict(METHODS, {"all_reduce": f"{__name__}:Averaged"}):
        engine = build(World(comm), WHERE)
        (first,) = steps_of(engine, 1)
    # each replica has its own samples' share of the gradient of the global batch
    whole = engine.buffer.gradients.clone()
    engine.axes["data"].all_reduce(whole)
    assert torch.equal(whole, plain.buffer.gradients)
    assert not equal_replicas(engine) and equal_replicas(plain)
    second = engine.step(1, microbatches(engine.config, 1, engine.axes["data"].rank))
    assert equal_replicas(engine)
    told = [(result.loss, result.grad_norm, result.skipped) for result in (first, second)]
    assert all(other == told for other in engine.axes.world.all_gather_object(told))


@parallel(ranks=[4])
def test_a_replica_that_is_not_finite_skips_the_step_of_all(comm):
    with patch.dict(METHODS, {"all_reduce": f"{__name__}:Averaged"}):
        engine = build(World(comm), WHERE)
    before = engine.buffer.masters[0].clone()
    if engine.axes["data"].rank == 1:
        engine.buffer.masters[0].view(-1)[0] = math.nan  # its loss is in the sum, its norm is not
        engine.buffer.refresh_weights()
    (result,) = steps_of(engine, 1)
    assert result.skipped and math.isnan(result.grad_norm)
    if engine.axes["data"].rank == 0:
        assert torch.equal(engine.buffer.masters[0], before)


@parallel(ranks=[4])
def test_replicas_that_differ_are_saved_each_or_as_their_mean(comm):
    """Every element once by each data rank; once, and in shares, where they are equal, or the mean
    is taken."""

    def elements(engine, mean: bool = False) -> tuple[int, int]:
        mine = sum(part.box.elements for part in share(engine.state, engine.axes, mean))
        return mine, sum(engine.axes.world.all_gather_object(mine))

    mine, once = elements(build(World(comm), WHERE))
    with patch.dict(METHODS, {"all_reduce": f"{__name__}:Averaged"}):
        engine = build(World(comm), WHERE)
    assert elements(engine)[1] == 2 * once
    assert elements(engine, mean=True) == (mine, once)
    steps_of(engine, 1)
    own = engine.buffer.masters[0].clone()
    whole = sum(engine.axes["data"].all_gather_object(own)) / 2
    with engine.replicas.averaged():
        assert torch.equal(engine.buffer.masters[0], whole)
        assert torch.equal(engine.buffer.weights, whole)
    assert torch.equal(engine.buffer.masters[0], own) and not equal_replicas(engine)
