"""muP: nothing changes at the base's width, rates by width, activations that do not grow."""

import pytest
import torch

from benchmarks.tuning import mup as benchmark
from ptdmpi.comm.world import World
from ptdmpi.config import InputError, OptimizerConfig
from ptdmpi.config.mup import learning_rate_factor
from ptdmpi.probe.coordinates import LAST_LAYER, LOGITS
from tests._configs import layout, small
from tests._engines import build, microbatches, train, whole_gradients, whole_weights
from tests.parallel import parallel

BASE = {"model.mup_base_hidden": 8}  # the model is 32 wide
RATIO = 4.0
LLAMA = {"model.kind": "llama", "model.ffn_hidden": 44}
PLAIN = {"optimizer.clip_norm": 0.0, "optimizer.warmup_steps": 0, "optimizer.decay": "constant"}


@parallel(ranks=[1])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_at_the_width_of_the_base_no_bit_changes(comm, kind):
    model = {"model.kind": kind}
    same = {"model.mup_base_hidden": 32, "model.mup_base_head_size": 8}
    plain, based = train(comm, model, steps=3), train(comm, {**model, **same}, steps=3)
    assert plain.losses == based.losses
    for name, values in plain.parameters.items():
        assert torch.equal(values, based.parameters[name]), name
    wider = train(comm, {**model, **BASE}, steps=3)
    assert wider.losses != plain.losses


@parallel(ranks=[4])
@pytest.mark.parametrize(
    "changes",
    [
        {**layout(t=2, p=2), "parallel.sequence_parallel": True},
        {**layout(p=2, d=2), "parallel.zero": 1, "optimizer.kind": "muon", **LLAMA},
        pytest.param(
            {**layout(t=2, d=2), "parallel.zero": 3, "optimizer.kind": "sgd"},
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_layout_trains_as_one_rank(comm, changes):
    exact = {"precision.compute": "fp64"}  # Muon iterates in bf16 otherwise
    changes = {**BASE, **exact, "model.mup_base_head_size": 4, **changes}
    serial = {key: value for key, value in changes.items() if not key.startswith("parallel.")}
    expected, run = train(comm, serial, steps=3), train(comm, changes, steps=3)
    assert run.losses == pytest.approx(expected.losses, rel=1e-10)
    for name, values in expected.parameters.items():
        assert torch.allclose(run.parameters[name], values, rtol=1e-6, atol=1e-9), name


@parallel(ranks=[1])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_first_update_is_as_large_as_the_table_says(comm, kind):
    """And the decay of a step is that of all widths."""
    rate, decay = 1e-2, 0.3
    keys = {"kind": kind, "learning_rate": rate, "weight_decay": decay}
    changes = {**BASE, **PLAIN, **{f"optimizer.{key}": value for key, value in keys.items()}}
    engine = build(World(comm), {**changes, "model.tie_embeddings": False})
    before = whole_weights(engine)
    engine.step(0, microbatches(engine.config, 0, 0))
    gradients = whole_gradients(engine)
    for name, after in whole_weights(engine).items():
        matrix = name.startswith("layers.") and after.dim() == 2
        gradient = gradients[name]
        if kind == "sgd":
            step = gradient * (1.0 if matrix else RATIO)
        else:
            step = gradient / (gradient.abs() + 1e-8) / (RATIO if matrix else 1.0)
        decays = after.dim() == 2
        expected = before[name] * (1 - rate * decay * decays) - rate * step
        assert torch.allclose(after, expected, rtol=1e-4, atol=1e-6), name


def test_muon_by_its_scale():
    """The spectral norm of an update must be the same at every width."""
    for scale, factor in (("original", 1.0), ("match_rms_adamw", 0.5)):
        muon = OptimizerConfig(kind="muon", muon_scale=scale)
        assert learning_rate_factor(muon, RATIO, in_layers=True) == factor
        assert learning_rate_factor(muon, RATIO, in_layers=False) == 1.0


@parallel(ranks=[1])
def test_activations_grow_with_the_width_only_without_mup(comm):
    # not the benchmark's own text, the pages of the documentation, because each edit changes it
    ids = torch.randint(256, (2**18,), generator=torch.Generator().manual_seed(1))
    world = World(comm)
    for mup, bound in ((True, 1.6), (False, 0.0)):
        sizes = {width: benchmark.coordinates(world, ids, width, mup=mup) for width in (32, 256)}
        for name in (LAST_LAYER, LOGITS):
            growth = sizes[256][name] / sizes[32][name]
            assert growth < bound if mup else growth > 2.0, (name, growth)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.experts": 4, "model.experts_per_token": 2}, "model.experts = 4"),
        ({"model.kind": "bert"}, 'model.attention = "bidirectional"'),
        ({"model.scale_embedding": True}, "model.scale_embedding = true"),
        ({"optimizer.kind": "own", "optimizer.own": "lion"}, 'optimizer.kind = "own"'),
        ({"adapt.method": "lora", "adapt.rank": 2}, 'adapt.method = "lora"'),
    ],
)
def test_what_is_not_defined_is_refused_in_a_line(changes, said):
    with pytest.raises(InputError) as error:
        small({**BASE, **changes})
    (line,) = [text for text in str(error.value).splitlines() if "mup_base_hidden = 8" in text]
    assert line.startswith(f"{said} cannot be combined with") and "legal: " in line
    with pytest.raises(InputError, match="mup_base_head_size = 4 needs"):
        small({"model.mup_base_head_size": 4})
