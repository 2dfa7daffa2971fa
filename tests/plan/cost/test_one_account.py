"""The guard of a training and the plan of its layout give the same bytes; and the table that both
count is what the model is built from."""

import itertools

import pytest
import torch

from ptdmpi.comm.communicator import OneRank
from ptdmpi.config import Layout
from ptdmpi.config.choices import CONTEXT_METHODS
from ptdmpi.model.stage import Stage
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.cost.relief import Step
from ptdmpi.plan.machine.cluster import TRAINER, Model, load_cluster
from ptdmpi.plan.search import choose
from ptdmpi.plan.shape import parameters
from tests._configs import small

VOCAB_SIZE = 301  # no axis divides it
KINDS = ("gpt", "llama", "bert")
SCHEDULED = ((1, 1, "1f1b"), (2, 1, "1f1b"), (4, 1, "gpipe"), (3, 2, "interleaved"))
SCHEDULED += ((2, 2, "gpipe"), (2, 3, "interleaved"), (3, 1, "zb-h1"), (2, 2, "zb-v"))
RECOMPUTED = (("none", "all"), ("selective", "all"), ("full", "all"), ("full", 3))
COMPUTE = ("fp32", "bf16", "fp64")
# sequence parallelism, a tied table, dropout: every pair of values of two of them
SWITCHES = ((False, False, False), (False, True, True), (True, False, True), (True, True, False))


def config_of(kind, tensor, scheduled, recompute, compute, switches=(False, True, False)):
    sequence, tied, drops = switches
    pipeline, virtual, schedule = scheduled
    mode, layers = recompute
    changes = {
        "model.kind": kind,
        "model.layers": 7,
        "model.kv_heads": 2,
        "model.tie_embeddings": tied,
        "model.dropout": 0.1 * drops,
        "model.attention_dropout": 0.1 * drops,
        "parallel.tensor": tensor,
        "parallel.pipeline": pipeline,
        "parallel.virtual": virtual,
        "parallel.schedule": schedule,
        "parallel.sequence_parallel": sequence and tensor > 1,
        "recompute.mode": mode,
        "recompute.layers": layers,
        "recompute.partition_activations": mode == "full" and not sequence,
        "batch.global_size": 22,
        "precision.compute": compute,
    }
    return small(changes, tensor * pipeline)


def pricer_of(config, wide_products=False, on_host=True):
    """As a probe writes a cluster of this trainer, with nothing before the first tensor."""
    cluster = load_cluster("cpu-avx2")
    peaks = dict.fromkeys(COMPUTE, 1e12)
    device = cluster.device.model_copy(update={"peak_flops": peaks, "runtime_bytes": 0.0})
    software = TRAINER.model_copy(update={"wide_products": wide_products})
    changes = {"device": device, "software": software}
    if not on_host:
        changes["measured"] = None
    model = Model("m", config.model, VOCAB_SIZE)
    batch, compute = config.batch.global_size, config.precision.compute
    return Pricer.of(cluster.model_copy(update=changes), model, batch, compute)


def some(cases, *short):
    """Return all cases; those that are not in `short` are long."""
    return [pytest.param(*case, marks=[] if case in short else pytest.mark.long) for case in cases]


TURNS = [(one, 1 + turn % 2, KINDS[turn % 3]) for turn, one in enumerate(SCHEDULED)]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("scheduled", "tensor", "kind"), some(itertools.product(SCHEDULED, [1, 2], KINDS), *TURNS)
)
def test_guard_and_plan_agree_to_the_byte(scheduled, tensor, kind):
    for recompute, compute, chosen in itertools.product(RECOMPUTED, COMPUTE, SWITCHES):
        config = config_of(kind, tensor, scheduled, recompute, compute, chosen)
        for wide in {False, compute == "bf16"}:
            kernels = {"wide_products": wide}
            guard = Step(MemoryModel.of(config, VOCAB_SIZE, kernels=kernels), config.layout, 22)
            ranks = range(config.parallel.pipeline)
            needed = max((guard.peak(rank) for rank in ranks), key=lambda peak: peak.total)
            pricer = pricer_of(config, wide)
            assert pricer.footprint(config.layout).total == needed.total
            assert pricer.footprint(config.layout) == guard.largest()[1]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("axes", "kind", "method"),
    some(
        [
            (axes, kind, method)
            for axes in [(1, 2), (1, 4), (2, 2)]
            for kind in KINDS
            for method in CONTEXT_METHODS
        ],
        ((1, 2), "gpt", "all_gather"),
        ((1, 2), "bert", "ulysses"),
        ((1, 2), "llama", "ring"),
        ((1, 4), "llama", "all_gather"),
        ((2, 2), "bert", "all_gather"),
    ),
)
def test_guard_and_plan_agree_where_sequences_are_cut(axes, kind, method):
    """To the byte, over t and c. A rank has less than with whole sequences, and more than 1/c; in a
    ring it may have less, since this keeps neither scores for dropout nor widened operands."""
    tensor, context = axes
    cut = {"context": context, "context_method": method}
    for recompute, compute, chosen in itertools.product(RECOMPUTED, COMPUTE, SWITCHES):
        whole = config_of(kind, tensor, (2, 1, "1f1b"), recompute, compute, chosen)
        parallel = whole.parallel.model_copy(update=cut)
        config = whole.model_copy(update={"parallel": parallel})
        for wide in {False, compute == "bf16"}:
            memory = MemoryModel.of(config, VOCAB_SIZE, kernels={"wide_products": wide})
            guard = Step(memory, config.layout, 22).largest()[1]
            plan = pricer_of(config, wide).footprint(config.layout)
            assert plan == guard
            most = pricer_of(whole, wide).footprint(whole.layout).activations
            least = 0 if method == "ring" else most / context
            assert least <= plan.activations < most


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("changes", [{}, {"parallel.data": 2}, {"parallel.shard_group": 2}])
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_guard_and_plan_agree_on_context_ranks_that_shard(zero, changes, method):
    where = {"parallel.context": 4, "parallel.context_method": method}
    where |= {"parallel.zero": zero, "recompute.mode": "full"}
    where |= changes if zero else {}
    config = small(where, 4 * where.get("parallel.data", 1))
    memory = MemoryModel.of(config, VOCAB_SIZE, on_host=False)
    guard = Step(memory, config.layout, config.batch.global_size)
    plan = pricer_of(config, on_host=False).footprint(config.layout)
    assert plan == guard.largest()[1]
    shards = where.get("parallel.shard_group", 4 * where.get("parallel.data", 1))
    assert config.layout.shards == (shards if zero else 1)


def test_what_auto_prints_is_what_the_guard_counts():
    config = config_of("gpt", 1, (1, 1, "1f1b"), ("none", "all"), "fp32")
    pricer = pricer_of(config)
    prices, _ = choose.choose(config, VOCAB_SIZE, pricer.cluster, 2)
    for price in prices:
        needed = Step(MemoryModel.of(config, VOCAB_SIZE), price.layout, 22).largest()[1]
        assert price.memory.total == needed.total


def test_published_tied_head_on_one_rank():
    """GPT l=12, h=768, V=50257, fp32: the tied head's own gradient counts, 2.759 GiB in all."""
    changes = {"model.layers": 12, "model.hidden": 768, "model.heads": 12}
    changes |= {"model.seq_length": 1024, "batch.micro_size": 1, "batch.global_size": 1}
    config = small(changes)
    memory = MemoryModel.of(config, 50257)
    table = 50257 * 768
    elements = parameters.parameter_count(config.model, 50257)
    assert memory.peak(config.layout, 0, 1).standing == 16 * elements + 4 * table


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [True, False, "attention", "mlp"])
@pytest.mark.parametrize("adapt", ["none", "lora", "ia3"])
def test_the_table_has_every_weight_of_the_model_by_name(kind, tied, bias, adapt):
    changes = {"model.kind": kind, "model.tie_embeddings": tied, "model.bias": bias}
    changes |= {"adapt.method": adapt}
    config = small(changes | {"model.kv_heads": 2})
    model = config.model
    parts = {f"embedding.{k}": v for k, v in parameters.embedding(model, VOCAB_SIZE).items()}
    for number in range(model.layers):
        parts |= {f"layers.{number}.{name}": v for name, v in parameters.layer(model).items()}
    parts |= parameters.head(model, VOCAB_SIZE)
    with torch.device("meta"):
        stage = Stage(config, VOCAB_SIZE, range(model.layers), TensorAxis(OneRank()))
    built: dict[str, list[int]] = {}
    for name, weight in stage.named_parameters():
        part, _, _ = name.rpartition(".")
        built.setdefault(part, []).append(weight.numel())
    assert built == {name: list(part.weights(1)) for name, part in parts.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tensor", [2, 4])
def test_a_tensor_rank_has_what_its_weights_declare(kind, tensor):
    config = small({"model.kind": kind, "model.ffn_hidden": 44}, 1)
    model = config.model
    stage = Stage(config, VOCAB_SIZE, range(model.layers), TensorAxis(OneRank()))
    declared = sum(
        torch.Size(weight.declaration.local_shape(tensor)).numel()
        for _, weight in stage.named_parameters()
    )
    memory = MemoryModel.of(config, VOCAB_SIZE)
    table = parameters.table_elements(model, VOCAB_SIZE, tensor) * model.tie_embeddings
    assert memory.stages.elements(Layout(tensor, 1, 1), 0) == declared - table
