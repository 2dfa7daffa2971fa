"""Each sublayer that the package offers: documents do not see each other, and every layout of the
sequence either computes the same losses or is refused."""

import pytest
import torch

from ptdmpi.comm.world import World
from ptdmpi.config.model import SUBLAYERS
from ptdmpi.engine.engine import Engine
from ptdmpi.parity import probe
from ptdmpi.plan.layer.legality import refusals
from tests._configs import small
from tests._engines import build, from_root
from tests._rows import LATENT
from tests.context.test_parity import PROBED, probed_batch
from tests.parallel import parallel


def changes_of(name: str) -> dict:
    """Return the changes for a model that has the sublayer `name`, and attention and an MLP."""
    if name == "latent_attention":
        plain = {key: value for key, value in PROBED.items() if key != "model.kv_heads"}
        return {**plain, **LATENT}
    return {**PROBED, "model.sublayers": list(dict.fromkeys(("attention", name, "mlp")))}


@parallel(ranks=[1])
@pytest.mark.parametrize("name", SUBLAYERS)
def test_a_token_changes_the_losses_of_its_document_alone(comm, name):
    engine = build(World(comm), changes_of(name))
    for in_several in (False, True):
        assert probe.faults(engine, probed_batch(engine, in_several), (1, 4, 5, 8)) == []


@parallel(ranks=[2])
@pytest.mark.parametrize("name", SUBLAYERS)
def test_two_context_ranks_compute_the_same_losses_or_are_refused(comm, name):
    cut = {**changes_of(name), "parallel.context": 2}
    config = small(cut, 2)
    if [*refusals(config.layout, config.model)]:
        return
    alone = World(comm).first(1)
    losses = None if alone is None else losses_of(build(alone, changes_of(name)))
    found = losses_of(build(World(comm), cut))
    torch.testing.assert_close(found, from_root(comm, losses), rtol=1e-12, atol=0)


def losses_of(engine: Engine) -> torch.Tensor:
    """The losses of all positions, in one document and in several."""
    batches = [probed_batch(engine, in_several) for in_several in (False, True)]
    return torch.stack([probe.losses_of(engine, batch) for batch in batches])
