"""The inventory against published formulas, and against what must hold for any sizes."""

from dataclasses import fields, replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ptdmpi.config import Layout
from ptdmpi.engine.data_parallel.reduce import TreeSum
from ptdmpi.plan.cost import tree
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.layer.account import kept, total_bytes
from ptdmpi.plan.layer.low_bit import CHUNK_BYTES
from ptdmpi.plan.layer.parts import Linear
from ptdmpi.plan.layer.products import adding_bytes, linear_backward
from ptdmpi.plan.layer.sizes import Sizes
from ptdmpi.plan.layout.run_method import BUCKET_ELEMENTS, MESSAGE_ELEMENTS
from ptdmpi.plan.layout.stages import placement_of
from ptdmpi.plan.machine.cluster import TRAINER, load_cluster, load_model
from ptdmpi.plan.schedule.ops import FORWARD
from ptdmpi.plan.schedule.orders import build
from ptdmpi.plan.shape.parameters import parameter_count
from tests import _configs
from tests._items import layer_items

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


def _sizes(config, software=TRAINER) -> Sizes:
    return Sizes(config.model, config.layout, config.precision.compute, software)


# Megatron-LM of 2021: dropout, and scores that are written to memory.
PUBLISHED = load_cluster("selene").software


def published_layer(s, b, h, a, t=1, sequence_parallel=False):
    """The layer of Korthikanti et al. 2022: fp16, a GPT."""
    model = load_model(f"l=1,h={h},a={a},s={s}").config
    layout = Layout(t, 1, 1, micro_size=b, sequence_parallel=sequence_parallel)
    return layer_items(Sizes(model, layout, "fp16", PUBLISHED), "none")


@pytest.mark.parametrize("row", TABLE_2)
@given(st.data())
def test_equals_korthikanti_table_2(row, data):
    sequence_parallel, mode, formula = TABLE_2[row]
    size = st.integers(1, 20)
    t, b = data.draw(size), data.draw(size)
    s, a = (t * data.draw(size) for _ in "sa")
    h = a * data.draw(size)
    items = kept(published_layer(s, b, h, a, t, sequence_parallel), mode)
    names = {name: Fraction(value) for name, value in zip("sbhat", (s, b, h, a, t), strict=True)}
    assert total_bytes(items) == eval(formula, names)


def test_without_parallelism_equals_korthikanti_equation_1():
    s, b, h, a = 2048, 1, 12288, 96
    layer = total_bytes(published_layer(s, b, h, a))
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
    return _sizes(_small(case | changes, ranks=tensor))


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("t", [1, 2])
def test_differs_from_korthikanti_only_as_documented(t, sequence_parallel, mode):
    """Norm statistics, the causal mask, and a softmax kept in float32: nothing else."""
    where = {"parallel.tensor": t, "parallel.sequence_parallel": sequence_parallel}
    ours = kept(layer_items(gpt3_like(**where), mode), mode)
    theirs = kept(published_layer(32, 2, 96, 6, t, sequence_parallel), mode)
    scores = 2 * 6 * 32 * 32 // t
    extra = {"attention.future", "attention_norm.statistics", "mlp_norm.statistics"}
    difference = sum(item.bytes for item in ours if item.name in extra)
    difference += 2 * scores if mode == "none" else 0
    assert total_bytes(ours) == total_bytes(theirs) + difference


def test_recomputes_the_first_layers_only():
    """A layer to a stage, looked at where there is neither embedding nor head."""
    changes = {"recompute.mode": "full", "recompute.layers": 3, "model.dropout": 0.1}
    config = _small(changes | _configs.layout(p=8), ranks=8)
    memory = MemoryModel.of(config, VOCAB_SIZE)
    per_layer = [memory.stages.kept_bytes(config.layout, stage) for stage in range(1, 7)]
    one_input = 16 * 32 * 4
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
    config = _small(changes | {"batch.global_size": m}, ranks=p)
    # a vocabulary of one makes the head too light to shift layers between stages
    memory, layout = MemoryModel.of(config, 1), config.layout
    assert all(len(layers) == 1 for layers in memory.stages.split(layout))
    boundary = 2 * 16 * 32 * 4 * v  # with one chunk the first rank has no stage before its own
    found = memory.peak(layout, 0, m)
    assert found.activations == in_flight * memory.stages.kept_bytes(layout, 0)
    assert found.working == memory.stages.working_bytes(layout, 0) + boundary
    if schedule == "interleaved":
        assert Fraction(in_flight, p * v) == 1 + Fraction(p - 1, p * v)
    elif schedule == "1f1b":
        assert in_flight == p


@pytest.mark.parametrize(("p", "v"), [(1, 1), (4, 1), (3, 2), (4, 3)])
def test_many_microbatches_need_no_more_than_a_few(p, v):
    """Op by op through a step that is longer than what is looked at."""
    m = 7 * p + (v == 1)
    changes = _configs.layout(p=p, v=v) | {"model.layers": p * v + 1, "batch.global_size": m}
    config = _small(changes, ranks=p)
    memory, layout = MemoryModel.of(config, VOCAB_SIZE), config.layout
    for rank in range(p):
        stages = placement_of(layout).stages_of(rank)
        held = peak = 0
        for kind, stage, _ in build(layout.schedule, p, v, m).orders[rank]:
            keeps = memory.stages.kept_bytes(layout, stage)
            held += keeps * (kind == FORWARD)
            peak = max(peak, held + memory.stages.working_bytes(layout, stage) * (kind != FORWARD))
            held -= keeps * (kind != FORWARD)
        sizes = _sizes(config)
        sides = (any(s > 0 for s in stages)) + (any(s + 1 < p * v for s in stages))
        found = memory.peak(layout, rank, m)
        assert found.activations + found.working == peak + 2 * sizes.boundary_bytes * sides


def test_one_stage_has_no_messages():
    config = _small({"model.dropout": 0.1})
    memory, layout = MemoryModel.of(config, VOCAB_SIZE), config.layout
    found = memory.peak(layout, 0, 8)
    assert found.activations == memory.stages.kept_bytes(layout, 0)
    assert found.working == memory.stages.working_bytes(layout, 0)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_widened_products_keep_float32_operands(compute):
    config = _small({"precision.compute": compute})
    plain, wide = (
        {item.name: item for item in layer_items(_sizes(config, software), "none")}
        for software in (TRAINER, TRAINER.model_copy(update={"wide_products": True}))
    )
    assert wide.keys() - plain.keys() == {
        "attention.query_key_value.copy",
        "attention.output.copy",
    }
    assert plain.keys() - wide.keys() == {"attention.query_key_value"}
    assert wide["attention.query_key_value.copy"].bytes == 3 * 16 * 32 * 4


@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp32"])
def test_a_kernel_that_adds_to_a_float32_sum_needs_no_product(compute):
    """For operands of 16 bits. A product in the type of the sum is always added in place."""
    config, shape, rows = _small({"precision.compute": compute}), (8, 12), 5
    plain, adds = (
        _sizes(config, TRAINER.model_copy(update={"adds_wide": adds})) for adds in (False, True)
    )
    product = 0 if compute == "fp32" else 8 * 12 * (2 + 4)
    needed = [linear_backward(sizes, shape, rows) for sizes in (plain, adds)]
    assert needed[0] - needed[1] == product
    linear = Linear(8, (12,), bias=False, init_std=1.0)
    assert adding_bytes(plain, linear) - adding_bytes(adds, linear) == product
    assert adding_bytes(adds, linear) == 0


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
        memory = MemoryModel.of(config, VOCAB_SIZE)
        peaks = [memory.peak(config.layout, rank, 1) for rank in range(p)]
        assert sum(peak.weights for peak in peaks) == 4 * count
        again = table if tied and p == 1 else 0
        assert sum(peak.gradients for peak in peaks) == 4 * (count + again)


@pytest.mark.parametrize(
    ("compute", "bytes_per_parameter"), [("bf16", 18), ("fp16", 18), ("fp32", 16), ("fp64", 32)]
)
def test_state_bytes_per_parameter(compute, bytes_per_parameter):
    config = _small({"precision.compute": compute, "model.tie_embeddings": False})
    count = parameter_count(config.model, VOCAB_SIZE)
    peak = MemoryModel.of(config, VOCAB_SIZE).peak(config.layout, 0, 1)
    assert peak.standing == bytes_per_parameter * count


@pytest.mark.parametrize(
    ("keys", "elements"),
    [
        ({"method": "ring"}, MESSAGE_ELEMENTS),
        ({"method": "parameter_server"}, MESSAGE_ELEMENTS),
        ({"method": "decentralized"}, 2 * 2 * BUCKET_ELEMENTS),
        ({"method": "decentralized", "overlap": True}, None),
    ],
)
def test_messages_have_room_when_nothing_is_in_flight_or_beside_it(keys, elements):
    """Few tokens of a wide model; without `overlap` only what activations had not."""
    told = {f"data_parallel.{key}": value for key, value in keys.items()}
    wide = {"model.hidden": 4096, "model.seq_length": 2, **_configs.layout(d=4)}
    plain, found = (_small(wide | changes, ranks=4) for changes in ({}, told))
    vocab_size = VOCAB_SIZE
    before, after = (
        MemoryModel.of(one, vocab_size).peak(one.layout, 0, 1) for one in (plain, found)
    )
    every = parameter_count(found.model, vocab_size)
    room = 4 * (2 * every if elements is None else elements)
    held = before.activations + before.working
    assert 0 < held < room
    more = room if elements is None else room - held
    assert after.total - before.total == more


COPIED = {"checkpoint.memory_every_steps": 5, "model.tie_embeddings": False}


@pytest.mark.parametrize(("nodes", "files"), [(1, 2), (2, 4), (5, 4)])
def test_copies_in_memory_count_on_the_host(nodes, files):
    """The new copy and the previous one, of the neighbour's ranks too if there are several nodes;
    12 bytes per parameter, of which two data ranks have a half each."""
    config = _small(COPIED | _configs.layout(d=2), ranks=2)
    share = 12 * parameter_count(config.model, VOCAB_SIZE) // 2
    memory = MemoryModel.of(config, VOCAB_SIZE, nodes=nodes)
    peak = memory.peak(config.layout, 0, 1)
    plain = replace(memory.method, copies=0)
    without = MemoryModel(config.model, VOCAB_SIZE, "fp32", method=plain).peak(config.layout, 0, 1)
    assert peak.copies == peak.parts["copies"] == peak.total - without.total == files * share
    assert "copies" not in without.parts
    assert memory.fits(config.layout, 1, peak.total) and peak.host == 0
    assert not memory.fits(config.layout, 1, peak.total - 1)
    apart = MemoryModel.of(config, VOCAB_SIZE, on_host=False, nodes=nodes)
    assert apart.uses_host(config.layout) and not memory.uses_host(config.layout)
    assert apart.host_bytes(config.layout, 0) == files * share
    beside = apart.peak(config.layout, 0, 1)
    assert (beside.host, beside.copies, beside.total) == (files * share, 0, without.total)


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_a_device_keeps_probabilities_in_float64(mode):
    """No kernel of PyTorch's for devices fuses attention in float64: they take the place of the
    log-sum-exp."""
    config = _small({"precision.compute": "fp64", "batch.micro_size": 2, "recompute.mode": mode})
    host = _sizes(config)
    layers = [layer_items(sizes, mode) for sizes in (host, replace(host, on_host=False))]
    before, after = ({item.name: item.bytes for item in kept(layer, mode)} for layer in layers)
    rows = 2 * 4 * 16
    swapped = {"attention.logsumexp": rows * 8}, {"attention.softmax": rows * 16 * 8}
    if mode == "none":
        assert dict(before.items() - after.items()) == swapped[0]
        assert dict(after.items() - before.items()) == swapped[1]
    else:
        assert before == after
    capped = _small({"precision.compute": "fp64", "model.attention_softcap": 5.0})
    names = {item.name for item in layer_items(replace(_sizes(capped), on_host=False), "none")}
    assert "attention.softmax" not in names


def test_a_dequantized_weight_is_there_in_layers_but_not_at_the_loss():
    """The largest is that of the MLP, of 4 x 32 x 32 elements."""
    low_bit = {"adapt.method": "lora", "quantize.weights": "int8", "quantize.block": 8}
    for vocab_size, more in ((1, 4 * 32 * 32 * (4 + CHUNK_BYTES)), (10**6, 0)):
        plain, packed = (
            MemoryModel.of(config, vocab_size).peak(config.layout, 0, 1).working
            for config in (_small({"adapt.method": "lora"}), _small(low_bit))
        )
        assert packed - plain == more


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 7])
def test_sums_of_the_tree_are_those_that_the_engine_stores(microbatches, replicas):
    method = object.__new__(TreeSum)
    method.leaves = microbatches * replicas
    during, own, merged, after = 0, [], {}, []
    for rank in range(replicas):
        nodes = {}
        for number in range(microbatches):
            during = max(during, len(nodes))
            method._merge(nodes, (0, rank * microbatches + number), torch.zeros(1))
        own.append(nodes)
    most = max(map(len, own))
    for nodes in own:
        for key, value in nodes.items():
            after.append(most + len(merged) + 1)
            method._merge(merged, key, value)
    assert len(merged) == 1
    found = tree.most_sums(microbatches, replicas)
    if replicas == 1:
        assert found == (during, during + 1)
    else:
        assert found[0] == during and found[1] <= max(during + 1, *after)


def test_the_tree_stores_gradients_of_the_step():
    """In the last of seven backwards there are two sums, of the microbatches 0 to 3 and of 4 and 5;
    after it, when activations are free, there is a third."""
    for length, vocab_size in ((256, 1), (16, 10**5)):
        changes = {"batch.global_size": 7, "model.seq_length": length}
        plain, summed = (
            MemoryModel.of(config, vocab_size).peak(config.layout, 0, 7)
            for config in (_small(changes), _small(changes | {"run.reproducible": True}))
        )
        in_backward = plain.total + 2 * plain.gradients
        after_it = plain.standing + 3 * plain.gradients
        assert summed.total == max(in_backward, after_it)
        assert (after_it > in_backward) == (length == 16)


# A layout, and other values of its fields. A field without other values cannot be changed alone.
ANY = Layout(2, 2, 4, context=2, micro_size=1, schedule="interleaved", virtual=2, recompute="full")
OTHERS = {
    "tensor": 1,
    "pipeline": 4,
    "data": 2,
    "virtual": 4,
    "micro_size": 2,
    "schedule": "1f1b",
    "recompute": "none",
    "sequence_parallel": True,
    "scatter_gather": False,
    "zero": 3,
    "dp_overlap": True,
    "recompute_layers": 1,
    "shard_group": 2,
    "offload": "optimizer",
    "partition_activations": True,
    "first_layers": 1,
    "context": 1,
    "context_method": "ulysses",
    "expert": 2,
    "expert_tensor": 1,
}


@pytest.mark.parametrize("field", [field.name for field in fields(Layout)])
def test_a_layout_asked_before_changes_no_other(field):
    """Results are cached by the fields that determine them, so no key may lack a field."""
    config = _small({"model.experts": 4, "model.experts_per_token": 2, "model.bias": False}).model
    other = replace(ANY, **{field: OTHERS[field]})
    if field == "schedule":
        other = replace(other, virtual=1)

    def asked(memory: MemoryModel, layout: Layout) -> list[object]:
        ranks = tuple(range(layout.pipeline))
        least = [*memory._least_held(layout, ranks, 4)]
        return [least, *(memory.peak(layout, rank, 4) for rank in ranks)]

    shared = MemoryModel(config, VOCAB_SIZE, "bf16")
    asked(shared, ANY)
    assert asked(shared, other) == asked(MemoryModel(config, VOCAB_SIZE, "bf16"), other)
