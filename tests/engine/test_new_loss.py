"""A second loss costs a row, and a tensor by its name: the size of the logits, as in a z-loss."""

from unittest.mock import patch

import pytest

from ptdmpi.comm.world import World
from ptdmpi.model.output import losses
from ptdmpi.model.output.heads import TokenOutput
from ptdmpi.model.output.losses import LOSS_KINDS, LossKind, recorded
from ptdmpi.train.validation import validation_record
from tests._configs import layout
from tests._engines import build, microbatches, steps_of
from tests.parallel import parallel

ROW = LossKind(lambda model: True, lambda batch: len(batch.samples), "size_loss")
FACTOR = 1e-3


def added(kind: LossKind):
    """The row, and the tensor: a sum over samples."""
    usual = TokenOutput.losses

    def with_size(output, batch, x, context):
        return {**usual(output, batch, x, context), "size": FACTOR * x.square().sum()}

    rows = patch.object(losses, "LOSS_KINDS", {**LOSS_KINDS, "size": kind})
    return rows, patch.object(TokenOutput, "losses", with_size)


@parallel(ranks=[1, 2, 4])
def test_a_second_loss(comm):
    """It is in the loss of a step and in its gradient, weighted by its own number, on all layouts;
    records have it under its key."""
    changes = {1: {}, 2: layout(p=2), 4: layout(p=2, d=2)}[comm.size]
    (plain,) = steps_of(build(World(comm), changes), 1)
    rows, tensors = added(ROW)
    with rows, tensors:
        engine = build(World(comm), changes)
        result, later = steps_of(engine, 2)
        task, size = result.losses["task"], result.losses["size"]
        assert size.count == engine.config.batch.global_size
        assert result.loss == pytest.approx(task.mean + size.mean, rel=1e-6)
        assert task.mean == pytest.approx(plain.loss, rel=1e-6)
        assert result.grad_norm != pytest.approx(plain.grad_norm, rel=1e-3)
        assert recorded(result.losses) == {"size_loss": size.mean}
        assert later.losses["size"].mean < size.mean, "it is trained"

        measured = engine.evaluate(microbatches(engine.config, 0, engine.axes["data"].rank))
        values, text = validation_record(["one"], [measured])
        assert values["validation_size_loss"] == measured["size"].mean
        assert values["validation_loss"] == measured["task"].mean and "size loss" in text
        everyone = comm.allgather((result.loss, result.losses, measured))
        assert everyone == [everyone[0]] * comm.size


@parallel(ranks=[2])
def test_one_that_does_not_train_is_measured(comm):
    (plain,) = steps_of(build(World(comm), layout(p=2)), 1)
    rows, tensors = added(LossKind(ROW.used_by, ROW.count, ROW.key, trains=False))
    with rows, tensors:
        (result,) = steps_of(build(World(comm), layout(p=2)), 1)
    assert (result.loss, result.grad_norm) == (plain.loss, plain.grad_norm)
    assert result.losses["size"].sum > 0
