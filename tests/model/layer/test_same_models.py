"""Ranks that have built different models are refused before they exchange a tensor."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from mpi4py import MPI

from ptdmpi.comm.world import World
from ptdmpi.config import SharedInputError
from ptdmpi.model.parameters import Split, declare
from ptdmpi.plan.layer.parts import Scale
from ptdmpi.plan.layer.sublayer import Sublayer
from tests import _own
from tests._configs import layout
from tests._engines import build
from tests.parallel import parallel


def of_rank(layers: Any) -> Sublayer:
    """A sublayer that is wider on rank 1 than on rank 0."""
    usual = _own.gained(layers)
    wider = replace(usual.operators[1].linear, outputs=(16 * (1 + MPI.COMM_WORLD.rank),))
    narrower = replace(usual.operators[3].linear, inputs=wider.outputs[0])
    down = replace(usual.operators[1], linear=wider)
    up = replace(usual.operators[3], linear=narrower)
    return Sublayer("gained", (usual.operators[0], down, up, usual.operators[4]))


@dataclass(frozen=True)
class StartsByRank(_own.Gain):
    def module(self, build: Any) -> Any:
        module = super().module(build)
        std = 0.5 + MPI.COMM_WORLD.rank
        width = _own.WIDTH
        module.weight = declare(build.axis.size, (width,), std, split=Split(0, (width,)))
        return module


def starts(layers: Any) -> Sublayer:
    """A sublayer whose initial values differ between the ranks."""
    rows = _own.gained(layers).operators
    core = StartsByRank("gained.core", ("y",), ("y",), Scale(_own.WIDTH))
    return Sublayer("gained", tuple(core if row.name == core.name else row for row in rows))


@parallel(ranks=[2])
@pytest.mark.parametrize("name", ["of_rank", "starts"])
def test_ranks_with_different_models_are_named(comm, name):
    for where in (layout(d=2), layout(t=2)):
        changes = {"model.sublayers": ("attention", f"{__name__}:{name}", "mlp")}
        with pytest.raises(SharedInputError, match="built different models: rank 1 and the first"):
            build(World(comm), changes | where)


@parallel(ranks=[2])
def test_pipeline_ranks_have_different_parameters(comm):
    changes = {"model.sublayers": ("attention", "tests._own:gained", "mlp")}
    build(World(comm), changes | layout(p=2))
