"""Adapters next to a frozen model: their gradients are those of the weights that they stand for.

Of W' = W + c B A the chain rule gives dA = c B^T dW' and dB = c dW' A^T, of W' = diag(l) W and
b' = l b it gives dl = sum over columns of dW' W + db' b: so what an engine without adapters finds
for the merged weights, which is compared with plain torch elsewhere, is the answer.
"""

import pytest
import torch
from torch import Tensor

from benchmarks.planning.allocated import measured
from ptdmpi.comm.world import World
from ptdmpi.config.adapt import targets_of
from ptdmpi.engine.engine import Engine
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.layer.parts import Linear
from ptdmpi.plan.shape import parameters
from tests._configs import layout
from tests._engines import (
    assert_same_bits,
    build,
    load,
    microbatches,
    passes,
    steps_of,
    train,
    whole_gradients,
    whole_weights,
)
from tests.parallel import parallel

LORA = {"adapt.method": "lora", "adapt.rank": 3, "adapt.alpha": 6.0}
IA3 = {"adapt.method": "ia3"}
LLAMA = {"model.kind": "llama", "model.kv_heads": 2, "model.ffn_hidden": 44}
EXACT = {"precision.compute": "fp64", "optimizer.clip_norm": 0.0}


def some_adapters(engine: Engine) -> dict[str, Tensor]:
    """Values that no adapter begins with, the same in every layout."""
    found = {}
    for name, before in whole_weights(engine).items():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        drawn = torch.randn(before.shape, generator=generator, dtype=torch.float64)
        found[name] = (before + 0.2 * drawn).to(before.dtype)
    return found


def rows_of(engine: Engine):
    """(prefix, linear's name, its output's rows, adapter's leaf) of each adapter of each layer."""
    model = engine.config.model
    parts = parameters.layer(model)
    for target, (name, output) in targets_of(model.adapt, model.gates, model.mlps).items():
        whole = name.replace("mlp.experts.", "mlp.experts.0.")
        linear = parts[whole]
        assert isinstance(linear, Linear)
        start = sum(linear.outputs[:output])
        rows = slice(start, start + linear.outputs[output])
        for i in range(model.adapt.first_layer, model.layers):
            for number in range(model.experts if whole != name else 1):
                own = whole.replace(".0.", f".{number}.")
                yield f"layers.{i}.{own}", rows, target.rpartition(".")[2], linear.split


def merged(base: dict[str, Tensor], own: dict[str, Tensor], engine: Engine) -> dict[str, Tensor]:
    found = {name: values.clone() for name, values in base.items()}
    adapt = engine.config.adapt
    for name, rows, leaf, split in rows_of(engine):
        weight, bias = found[f"{name}.weight"], found.get(f"{name}.bias")
        if adapt.method == "lora":
            a, b = own[f"{name}.lora_{leaf}.a"], own[f"{name}.lora_{leaf}.b"]
            weight[rows] += adapt.scale * b @ a
        elif split == "rows":
            weight *= own[f"{name}.ia3_{leaf}.weight"]
        else:
            weight[rows] *= own[f"{name}.ia3_{leaf}.weight"][:, None]
            if bias is not None:
                bias[rows] *= own[f"{name}.ia3_{leaf}.weight"]
    return found


def expected(base, own, dense: dict[str, Tensor], engine: Engine) -> dict[str, Tensor]:
    """The gradients of the adapters from those of the merged weights."""
    found, adapt = {}, engine.config.adapt
    for name, rows, leaf, split in rows_of(engine):
        grown = dense[f"{name}.weight"]
        if adapt.method == "lora":
            a, b = own[f"{name}.lora_{leaf}.a"], own[f"{name}.lora_{leaf}.b"]
            found[f"{name}.lora_{leaf}.a"] = adapt.scale * b.t() @ grown[rows]
            found[f"{name}.lora_{leaf}.b"] = adapt.scale * grown[rows] @ a.t()
            continue
        product = grown * base[f"{name}.weight"]
        gradient = product.sum(0) if split == "rows" else product[rows].sum(1)
        if split != "rows" and f"{name}.bias" in base:
            gradient = gradient + (dense[f"{name}.bias"] * base[f"{name}.bias"])[rows]
        found[f"{name}.ia3_{leaf}.weight"] = gradient
    return found


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12)


LAYOUTS = {
    1: [{}, {"recompute.mode": "full"}],
    2: [layout(t=2), layout(p=2) | {"parallel.schedule": "zb-h1"}],
    4: [
        layout(t=4) | {"parallel.sequence_parallel": True},
        layout(t=2, p=2) | {"parallel.sequence_parallel": True, "parallel.schedule": "zb-h1"},
        layout(t=2, d=2) | {"parallel.zero": 3, "recompute.mode": "selective"},
    ],
}


CASES = [
    pytest.param(LORA, LLAMA, id="llama-lora"),
    pytest.param(IA3, LLAMA, id="llama-ia3", marks=pytest.mark.long),
    pytest.param(LORA, {}, id="gpt-lora", marks=pytest.mark.long),
    pytest.param(IA3, {}, id="gpt-ia3", marks=pytest.mark.long),
]


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(("method", "kind"), CASES)
def test_gradients_are_those_of_the_merged_weights(comm, method, kind):
    for chosen in LAYOUTS[comm.size]:
        changes = EXACT | kind | chosen
        whole, adapted = (build(World(comm), changes | more) for more in ({}, method))
        base, own = whole_weights(whole), some_adapters(adapted)
        load(adapted, own)
        load(whole, merged(base, own, adapted))
        (dense,), (found,) = steps_of(whole, 1), steps_of(adapted, 1)
        assert found.loss == pytest.approx(dense.loss, rel=1e-12)
        answer, gradients = (
            expected(base, own, whole_gradients(whole), adapted),
            whole_gradients(adapted),
        )
        assert gradients.keys() == answer.keys()
        for name, gradient in gradients.items():
            assert close(gradient, answer[name]), (chosen, name)


SAME_BITS = {
    2: [
        layout(p=2) | {"parallel.schedule": "zb-h1"},
        layout(p=2, v=2) | {"parallel.schedule": "zb-v", "model.layers": 4},
        layout(p=2) | {"recompute.mode": "full"},
    ],
    4: [
        layout(t=2, p=2) | {"parallel.schedule": "zb-h1", "recompute.mode": "selective"},
        layout(t=2, d=2) | {"parallel.zero": 1},
        layout(d=4) | {"parallel.zero": 3, "recompute.mode": "full", "batch.micro_size": 2},
    ],
}


@pytest.mark.long
@parallel(ranks=[2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bits_do_not_depend_on_pipeline_schedule_sharding_or_recomputation(comm, precision):
    """With dropout in the adapters: what is drawn again in a backward is what was drawn."""
    own = {"precision.compute": precision, "adapt.dropout": 0.1} | LORA
    for chosen in SAME_BITS[comm.size]:
        plain = {k: v for k, v in chosen.items() if k in ("model.layers", "batch.micro_size")}
        sizes = layout(t=chosen["parallel.tensor"], d=chosen["parallel.data"])
        expected = train(comm, own | plain | sizes, steps=2)
        found = train(comm, own | chosen, steps=2)
        assert_same_bits(found, expected)


@parallel(ranks=[1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_base_has_weights_alone(comm, precision):
    """In the compute type; no gradient, master or moment, nor what no gradient needs is kept."""
    changes = {"precision.compute": precision} | LLAMA | layout(p=comm.size)
    engine = build(World(comm), changes | LORA)
    buffer = engine.buffer
    assert set(buffer.entries).isdisjoint(buffer.frozen)
    assert all(".lora_" in name for name in buffer.entries)
    assert buffer.idle_weights.dtype == buffer.precision.compute
    before = buffer.idle_weights.clone()
    steps_of(engine, 2)
    assert torch.equal(before, buffer.idle_weights)
    memory = MemoryModel.of(engine.config, engine.vocab_size)
    foreseen = memory.peak(
        engine.config.layout, engine.axes["pipeline"].rank, engine.config.microbatches
    )
    frozen = sum(entry.elements for entry in buffer.frozen.values())
    own = sum(entry.elements for entry in buffer.entries.values())
    size = buffer.precision.compute.itemsize
    assert foreseen.weights == size * (frozen + own)
    assert foreseen.gradients == 4 * own
    assert foreseen.optimizer == 4 * own * (2 + (precision != "fp32"))


@pytest.mark.cases(1)
@parallel(ranks=[1])
@pytest.mark.parametrize(
    ("targets", "mode"),
    [
        ("all", "none"),
        (("attention.q", "mlp.down"), "full"),
        pytest.param("all", "full", marks=pytest.mark.long),
        pytest.param(("attention.q", "mlp.down"), "none", marks=pytest.mark.long),
    ],
)
def test_activations_are_those_of_the_account(comm, mode, targets):
    """Kept by a forward: at most what is foreseen, which takes the first layer for one of all."""
    changes = {"model.layers": 6, "model.hidden": 64, "model.seq_length": 32} | LLAMA
    changes |= {"recompute.mode": mode, "adapt.targets": targets}
    engine = build(World(comm), changes | LORA)
    memory = MemoryModel.of(engine.config, engine.vocab_size)
    batches = microbatches(engine.config, 0, 0)
    steps_of(engine, 1)
    (stage,) = engine.stages.values()
    given = passes(batches)
    stage.begin_step()
    left, _ = measured(lambda: stage.forward_microbatch(given[0], None))
    stage.backward_microbatch(given[0], None)
    foreseen = memory.stages.kept_bytes(engine.config.layout, 0)
    assert 0.9 * foreseen < left <= 1.01 * foreseen, (left, foreseen)
    watch = engine.stopwatch()
    _, peak = measured(lambda: engine.runner.run(engine.schedule, engine.program, given, watch))
    peaks = memory.peak(engine.config.layout, 0, engine.config.microbatches)
    foreseen = peaks.activations + peaks.working
    # of few targets what a recomputation lets go of again is more than a backward needs
    assert 0.7 * foreseen < peak < (1.1 if targets == "all" else 1.3) * foreseen, (peak, foreseen)


@parallel(ranks=[1, 4])
def test_what_is_idle_has_no_backward(comm):
    """In front of the first adapter nothing is kept, and no gradient is computed."""
    changes = {"adapt.targets": ["mlp.down"]} | LORA
    if comm.size == 4:
        changes |= layout(t=2, p=2) | {"parallel.sequence_parallel": True}
    engine = build(World(comm), changes)
    first = next((stage for stage in engine.stages.values() if stage.first), None)
    if first is not None:
        seen = []
        first.layers["0"].attention.register_full_backward_hook(lambda *given: seen.append(1))
        steps_of(engine, 1)
        assert not seen
    else:
        steps_of(engine, 1)
