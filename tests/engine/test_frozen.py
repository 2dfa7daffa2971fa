"""Parameters that do not train: no gradient, master or moments; all others train as if they did."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from ptdmpi.comm.world import World
from ptdmpi.engine import engine as engines
from ptdmpi.model.stage import Stage
from tests._configs import layout
from tests._engines import build, steps_of, whole_gradients
from tests.parallel import parallel

FROZEN = (".mlp.", "norm", "embedding.")


class PartlyFrozen(Stage):
    """A stage of which attention alone trains, and the head where it is not tied."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        for name, weight in self.named_logical_parameters():
            if any(part in name for part in FROZEN):
                weight.declaration = replace(weight.declaration, trains=False)


@parallel(ranks=[1, 4])
@pytest.mark.parametrize(
    ("precision", "tied", "recompute"),
    [("fp32", True, "none"), ("fp32", False, "full"), ("bf16", True, "none")],
)
def test_what_trains_trains_as_before_and_the_rest_stays(comm, precision, tied, recompute):
    changes = {
        "precision.compute": precision,
        "model.tie_embeddings": tied,
        "recompute.mode": recompute,
        "optimizer.clip_norm": 0.0,
    }
    if comm.size == 4:
        changes |= layout(t=2, p=2) | {"parallel.sequence_parallel": True}
    whole = build(World(comm), changes)
    with patch.object(engines, "Stage", PartlyFrozen):
        partly = build(World(comm), changes)
    assert not any(part in name for name in partly.buffer.entries for part in FROZEN)
    assert len(partly.buffer.entries) + len(partly.buffer.frozen) == len(whole.buffer.entries)
    sizes = [flat.numel() for flat in (partly.buffer.master, partly.buffer.gradients)]
    assert sizes[0] == sizes[1] < whole.buffer.master.numel()
    before = {n: e.view(partly.buffer.weights).clone() for n, e in partly.buffer.frozen.items()}
    (expected,), (found,) = steps_of(whole, 1), steps_of(partly, 1)
    assert found.loss == expected.loss and 0.0 < found.grad_norm < expected.grad_norm
    gradients = whole_gradients(whole)
    for name, gradient in whole_gradients(partly).items():
        assert torch.equal(gradient, gradients[name]), name
    for name, entry in partly.buffer.frozen.items():
        assert torch.equal(entry.view(partly.buffer.weights), before[name]), name
        assert whole.buffer.entries[name].declaration.shape == entry.declaration.shape
