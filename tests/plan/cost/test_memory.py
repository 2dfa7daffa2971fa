"""The inventory against published formulas, and against what must hold for any sizes."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptdmpi.plan.cost.counts import parameter_count
from ptdmpi.plan.cost.memory import (
    Sizes,
    backward_working_bytes,
    kept,
    korthikanti_layer,
    layer_activations,
    peak_activation_bytes,
    stage_activations,
    stages_of,
    total_bytes,
)
from ptdmpi.plan.cost.state import state_bytes
from ptdmpi.plan.schedule.ops import FORWARD
from ptdmpi.plan.schedule.orders import build, default_kind
from tests import _configs

VOCAB_SIZE = 101
SHAPE = {
    "model.layers": 8,
    "model.hidden": 32,
    "model.heads": 4,
    "model.seq_length": 16,
    "batch.global_size": 8,
    "batch.micro_size": 1,
}
# Korthikanti et al. 2022, Table 2: (sequence parallel, recomputation, bytes per layer)
TABLE_2 = {
    "tensor": (False, "none", "s*b*h*(10 + 24/t + 5*a*s/(h*t))"),
    "tensor + sequence": (True, "none", "s*b*h*(34/t + 5*a*s/(h*t))"),
    "tensor + selective": (False, "selective", "s*b*h*(10 + 24/t)"),
    "tensor + sequence + selective": (True, "selective", "s*b*h*(34/t)"),
    "full": (False, "full", "2*s*b*h"),
    "full, input divided": (True, "full", "2*s*b*h/t"),
}


def _small(changes, ranks: int = 1):
    return _configs.small(SHAPE | changes, ranks)


@pytest.mark.parametrize("row", TABLE_2)
@given(st.data())
def test_equals_korthikanti_table_2(row, data):
    sequence_parallel, mode, formula = TABLE_2[row]
    size = st.integers(1, 50)
    t, b = data.draw(size), data.draw(size)
    s, h, a = (t * data.draw(size) for _ in "sha")
    items = kept(korthikanti_layer(s, b, h, a, t, sequence_parallel), mode)
    names = {name: Fraction(value) for name, value in zip("sbhat", (s, b, h, a, t), strict=True)}
    assert total_bytes(items) == eval(formula, names)


def test_without_parallelism_equals_korthikanti_equation_1():
    s, b, h, a = 2048, 1, 12288, 96
    layer = total_bytes(korthikanti_layer(s, b, h, a))
    assert layer == s * b * h * 34 + 5 * a * s * s * b


def gpt3_like(**changes) -> Sizes:
    """The unfused, fp16, dropout-on case of this code."""
    case = {
        "model.hidden": 96,
        "model.heads": 6,
        "model.seq_length": 32,
        "model.dropout": 0.1,
        "model.attention_dropout": 0.1,
        "batch.micro_size": 2,
        "precision.compute": "fp16",
    }
    tensor = changes.get("parallel.tensor", 1)
    return Sizes(_small(case | changes, ranks=tensor))


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("t", [1, 2])
def test_differs_from_korthikanti_only_as_documented(t, sequence_parallel, mode):
    """Norm statistics, the causal mask, and a softmax kept in float32: nothing else."""
    where = {"parallel.tensor": t, "parallel.sequence_parallel": sequence_parallel}
    ours = kept(layer_activations(gpt3_like(**where), mode), mode)
    theirs = kept(korthikanti_layer(32, 2, 96, 6, t, sequence_parallel), mode)
    scores = 2 * 6 * 32 * 32 // t
    extra = {"attention.future", "attention_norm.statistics", "mlp_norm.statistics"}
    difference = sum(item.bytes for item in ours if item.name in extra)
    difference += 2 * scores if mode == "none" else 0
    assert total_bytes(ours) == total_bytes(theirs) + difference


def test_recomputes_the_first_layers_only():
    sizes = gpt3_like(**{"recompute.mode": "full", "recompute.layers": 3})
    per_layer = [
        total_bytes(stage_activations(sizes, VOCAB_SIZE, range(i, i + 1))) for i in range(1, 7)
    ]
    one_input = 32 * 2 * 96 * 2
    assert per_layer[:2] == [one_input] * 2
    assert len(set(per_layer[2:])) == 1
    assert per_layer[2] > 10 * one_input


@pytest.mark.parametrize(
    ("p", "v", "m", "schedule", "in_flight"),
    [(4, 1, 8, "1f1b", 4), (4, 1, 8, "gpipe", 8), (4, 2, 8, "interleaved", 11)],
)
def test_first_rank_holds_what_its_schedule_has_in_flight(p, v, m, schedule, in_flight):
    """1F1B's first rank: p microbatches of l/p layers; interleaved 1 + (p-1)/(p v) of all l
    (Korthikanti et al. 2022, section 4.2.3), whose warm-up is one chunk's forward."""
    changes = _configs.layout(p=p, v=v) | {"parallel.schedule": schedule, "model.layers": p * v}
    sizes = Sizes(_small(changes | {"batch.global_size": m}, ranks=p))
    # a vocabulary of one makes the head too light to shift layers between stages
    stages = stages_of(sizes.config, 1, 0)
    assert all(len(layers) == 1 for layers in stages.values())
    chunk = total_bytes(stage_activations(sizes, 1, stages[0]))
    boundary = 2 * 16 * 32 * 4 * v  # with one chunk the first rank has no stage before its own
    working = backward_working_bytes(sizes, 1, stages[0])
    assert peak_activation_bytes(sizes, 1, 0) == in_flight * chunk + working + boundary
    if schedule == "interleaved":
        assert Fraction(in_flight, p * v) == 1 + Fraction(p - 1, p * v)
    elif schedule == "1f1b":
        assert in_flight == p


@pytest.mark.parametrize(("p", "v"), [(1, 1), (4, 1), (3, 2), (4, 3)])
def test_many_microbatches_need_no_more_than_a_few(p, v):
    """Op by op through a step that is longer than what is looked at."""
    m = 7 * p + (v == 1)
    changes = _configs.layout(p=p, v=v) | {"model.layers": p * v + 1, "batch.global_size": m}
    sizes = Sizes(_small(changes, ranks=p))
    for rank in range(p):
        stages = stages_of(sizes.config, VOCAB_SIZE, rank)
        keeps = {
            s: total_bytes(stage_activations(sizes, VOCAB_SIZE, own)) for s, own in stages.items()
        }
        held = peak = 0
        for kind, stage, _ in build(default_kind(v), p, v, m).orders[rank]:
            if kind == FORWARD:
                held += keeps[stage]
            works = backward_working_bytes(sizes, VOCAB_SIZE, stages[stage])
            peak = max(peak, held + works * (kind != FORWARD))
            held -= keeps[stage] * (kind != FORWARD)
        boundary = sizes.local_tokens * sizes.config.model.hidden * sizes.compute_bytes
        sides = (any(s > 0 for s in stages)) + (any(s + 1 < p * v for s in stages))
        assert peak_activation_bytes(sizes, VOCAB_SIZE, rank) == peak + 2 * boundary * sides


def test_one_stage_has_no_messages():
    sizes = gpt3_like()
    layers = range(sizes.config.model.layers)
    expected = total_bytes(stage_activations(sizes, VOCAB_SIZE, layers))
    expected += backward_working_bytes(sizes, VOCAB_SIZE, layers)
    assert peak_activation_bytes(sizes, VOCAB_SIZE, 0) == expected


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_widened_products_keep_float32_operands(compute):
    config = _small({"precision.compute": compute})
    plain, wide = (
        {item.name: item for item in layer_activations(Sizes(config, copies), "none")}
        for copies in (False, True)
    )
    assert wide.keys() - plain.keys() == {
        "attention.query_key_value.copy",
        "attention.output.copy",
    }
    assert plain.keys() - wide.keys() == {"attention.query_key_value"}
    assert wide["attention.query_key_value.copy"].bytes == 3 * 16 * 32 * 4


@pytest.mark.parametrize("kind", ["gpt", "llama", "bert"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [True, False, "attention", "mlp"])
def test_state_counts_every_parameter_once(kind, tied, bias):
    changes = {"model.kind": kind, "model.kv_heads": 2, "model.tie_embeddings": tied}
    changes["model.bias"] = bias
    table = VOCAB_SIZE * 32
    for p in (1, 2, 4):
        config = _small(changes | _configs.layout(p=p), ranks=p)
        count = parameter_count(config.model, VOCAB_SIZE) + (table if tied and p > 1 else 0)
        items = [i for r in range(p) for i in state_bytes(Sizes(config), VOCAB_SIZE, r)]
        masters = [item.elements for item in items if item.name == "master_weights"]
        gradients = [item.elements for item in items if item.name == "gradients"]
        assert sum(masters) == count
        assert sum(gradients) == count + (table if tied and p == 1 else 0)


@pytest.mark.parametrize(
    ("compute", "bytes_per_parameter"), [("bf16", 18), ("fp16", 18), ("fp32", 16), ("fp64", 32)]
)
def test_state_bytes_per_parameter(compute, bytes_per_parameter):
    config = _small({"precision.compute": compute, "model.tie_embeddings": False})
    count = parameter_count(config.model, VOCAB_SIZE)
    items = state_bytes(Sizes(config), VOCAB_SIZE, 0)
    assert total_bytes(items) == bytes_per_parameter * count
