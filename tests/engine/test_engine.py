"""The same training in every layout: to rounding over t and d, to the bit over everything else."""

import functools

import pytest
import torch
from mpi4py import MPI

from ptdmpi.comm.world import World
from tests import _reference as reference
from tests._configs import layout
from tests._engines import (
    VOCAB_SIZE,
    Run,
    assert_same_bits,
    build,
    from_root,
    greatest_difference,
    microbatches,
    steps_of,
    tokens,
    train,
    whole_weights,
)
from tests._layers import difference
from tests.parallel import parallel

TOLERANCES = {"fp32": 1e-5, "fp64": 1e-12}
PARAMETER_TOLERANCES = {"fp32": 1e-3, "fp64": 1e-11}  # Adam amplifies rounding
long = pytest.mark.long  # what others meet in part


def is_key_bias(name: str) -> bool:
    # the softmax does not see the keys' bias: its gradient is rounding, which Adam blows up
    return name.endswith("qkv.bias")


@functools.cache
def serial(changes: tuple[tuple[str, object], ...], steps: int, masked: bool) -> Run:
    """The training of one rank, once per mpirun."""
    return train(MPI.COMM_SELF, dict(changes), steps=steps, masked=masked)


def check_close(comm, changes: dict, where: dict, *, steps: int = 3, masked: bool = True) -> None:
    """`changes` in the layout `where` trains as on one rank."""
    precision = changes["precision.compute"]
    found = train(comm, changes | where, steps=steps, masked=masked)
    alone = serial(tuple(changes.items()), steps, masked) if comm.rank == 0 else None
    expected = from_root(comm, alone)
    assert expected.losses[0] != expected.losses[-1]
    assert greatest_difference(found.losses, expected.losses) < TOLERANCES[precision]
    assert greatest_difference(found.norms, expected.norms) < TOLERANCES[precision]
    assert found.parameters.keys() == expected.parameters.keys()
    for name, values in found.parameters.items():
        if not is_key_bias(name):
            error = difference(values, expected.parameters[name])
            assert error < PARAMETER_TOLERANCES[precision], name


LAYOUTS = [
    layout(),
    layout(t=2),
    layout(p=2),
    layout(d=2),
    layout(t=2, p=2, v=2),
    layout(t=2, p=2, d=2),
    layout(p=4, v=2),
]


@parallel(ranks=[1, pytest.param(2, marks=long), 4, 8])
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=long), "fp64"])
def test_layouts_give_the_same_training(comm, precision):
    for where in LAYOUTS:
        ranks = where["parallel.tensor"] * where["parallel.pipeline"] * where["parallel.data"]
        if ranks == comm.size:
            changes = {"precision.compute": precision, "model.layers": 8}
            check_close(comm, changes, where, steps=5)


@parallel(ranks=[4])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"parallel.sequence_parallel": True}, marks=long),
        pytest.param({"model.tie_embeddings": False}, marks=long),
        pytest.param(
            {"model.kind": "llama", "model.ffn_hidden": 48, "model.kv_heads": 2}, marks=long
        ),
        pytest.param(
            {"model.dropout": 0.1, "model.attention_dropout": 0.1, "recompute.mode": "full"},
            marks=long,
        ),
        {"model.dropout": 0.1, "parallel.sequence_parallel": True},
    ],
    ids=["sequence-parallel", "untied", "llama", "dropout", "dropout-sequence-parallel"],
)
def test_kinds_of_models_give_the_same_training(comm, changes):
    for where in (layout(t=2, p=2), layout(t=2, d=2)):
        check_close(comm, {"precision.compute": "fp64", **changes}, where)


MODERN = {
    "qwen2": {"model.kind": "qwen2", "model.kv_heads": 2},
    "qwen3": {"model.kind": "qwen3", "model.kv_heads": 1, "model.head_size": 6},
    "mistral": {"model.kind": "mistral", "model.sliding_window": 5, "model.kv_heads": 2},
    "gemma2": {
        "model.kind": "gemma2",
        "model.kv_heads": 1,
        "model.head_size": 6,
        "model.sliding_window": 5,
        "model.attention_softcap": 0.3,
        "model.logit_softcap": 0.5,
    },
}


@pytest.mark.long
@parallel(ranks=[4])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "gemma2" else long) for kind in MODERN]
)
def test_modern_models_give_the_same_training(comm, kind):
    """Key heads that several tensor ranks share, norms of queries and keys, windows and caps: the
    same losses, norms and weights, with the sequence divided and everything recomputed."""
    changes = {"precision.compute": "fp64", "model.ffn_hidden": 48, **MODERN[kind]}
    changes |= {"parallel.sequence_parallel": True, "recompute.mode": "full"}
    for where in (layout(t=4), layout(t=2, p=2)):
        check_close(comm, changes, where, steps=2)


@parallel(ranks=[2])
def test_unmasked_tokens(comm):
    changes = {"precision.compute": "fp64"}
    check_close(comm, changes, layout(d=2), masked=False)
    check_close(comm, changes, layout(p=2), masked=False)


@parallel(ranks=[2])
@pytest.mark.parametrize("micro_size", [1, 4])
def test_microbatch_size_does_not_matter(comm, micro_size):
    """Microbatches have unequal numbers of valid tokens: a mean of means would differ."""
    changes = {"precision.compute": "fp64"}
    check_close(comm, changes, layout(d=2) | {"batch.micro_size": micro_size})


@pytest.mark.cases(3)
@parallel(ranks=[1])
@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["gpt", "llama", "qwen3", "gemma2"])
def test_serial_training_is_that_of_plain_torch(comm, clip_norm, kind):
    """Against the reference model and torch's own AdamW, clipping and cosine, five steps."""
    changes = {"precision.compute": "fp64", "model.kind": kind, "model.ffn_hidden": 48}
    changes |= MODERN.get(kind, {})
    changes |= {"optimizer.clip_norm": clip_norm}
    engine = build(World(comm), changes)
    config, model = engine.config, engine.config.model
    weights = reference.leaves(whole_weights(engine))
    results = steps_of(engine, 5)

    groups = [
        {"params": [w for w in weights.values() if w.dim() > 1], "weight_decay": 0.1},
        {"params": [w for w in weights.values() if w.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step, result in enumerate(results):
        for group in adam.param_groups:
            group["lr"] = result.learning_rate
        ids, mask = tokens(config, step)
        adam.zero_grad()
        loss = reference.summed_loss(weights, model, ids[:, :-1], ids[:, 1:], mask) / mask.sum()
        loss.backward()
        bound = clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), bound, foreach=False)
        adam.step()
        assert greatest_difference([result.loss], [float(loss)]) < 1e-12
        assert greatest_difference([result.grad_norm], [float(norm)]) < 1e-12
    for name, values in whole_weights(engine).items():
        if not is_key_bias(name):
            assert difference(values, weights[name]) < 1e-11, name


# At equal t, d and b, nothing of this changes a bit. 5 and 7 layers: no p v divides them.
SAME_BITS = {
    "p=2": layout(p=2),
    "p=2 gpipe": layout(p=2) | {"parallel.schedule": "gpipe"},
    "p=4": layout(p=4),
    "p=1 v=3": layout(v=3),
    "p=2 v=2": layout(p=2, v=2),
    "p=2 v=3 gpipe": layout(p=2, v=3) | {"parallel.schedule": "gpipe"},
    "p=2, 2 layers first": layout(p=2) | {"parallel.first_layers": 2},
    "p=2 v=2, 1 layer first": layout(p=2, v=2) | {"parallel.first_layers": 1},
    "selective": {"recompute.mode": "selective"},
    "full": layout(p=2) | {"recompute.mode": "full"},
    "full, 3 layers": layout(p=2, v=2) | {"recompute.mode": "full", "recompute.layers": 3},
}
# each schedule, more than one virtual stage, an uneven split, and each recomputation
FEW = {"p=2 gpipe", "p=4", "p=1 v=3", "p=2 v=2, 1 layer first", "selective", "full, 3 layers"}
SAME_BITS_TENSOR = {
    "scatter": layout(t=2, p=2),
    "no scatter": layout(t=2, p=2) | {"parallel.scatter_gather": False},
    "v=2": layout(t=2, p=2, v=2) | {"recompute.mode": "selective"},
}


@parallel(ranks=[4], limit_s=120)
@pytest.mark.parametrize(
    ("precision", "tied", "names"),
    [
        ("bf16", True, FEW),
        pytest.param("bf16", True, SAME_BITS.keys() - FEW, marks=long),
        pytest.param("fp32", False, FEW, marks=long),
    ],
    ids=["bf16", "bf16, others", "fp32"],
)
def test_pipeline_schedule_and_recomputation_change_no_bit(comm, precision, tied, names):
    changes = {"precision.compute": precision, "model.layers": 7, "model.tie_embeddings": tied}
    changes |= {"batch.global_size": 6}
    expected = train(comm, changes, steps=2)
    for name in sorted(names):
        print(name)
        assert_same_bits(train(comm, changes | SAME_BITS[name], steps=2), expected)


@pytest.mark.long
@parallel(ranks=[4], limit_s=120)
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=long), "bf16"])
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=long), True])
def test_pipeline_and_scatter_gather_change_no_bit_at_t_2(comm, precision, sequence_parallel):
    changes = {"precision.compute": precision, "model.layers": 5, "model.dropout": 0.1}
    changes |= {"parallel.sequence_parallel": sequence_parallel}
    expected = train(comm, changes | layout(t=2), steps=2)
    for name, where in SAME_BITS_TENSOR.items():
        print(name)
        assert_same_bits(train(comm, changes | where, steps=2), expected)


@long
@parallel(ranks=[4], limit_s=120)
@pytest.mark.parametrize(
    "changes",
    [
        {"precision.compute": "bf16", "model.dropout": 0.1, "model.attention_dropout": 0.1},
        {"model.kind": "llama", "model.kv_heads": 1, "recompute.layers": 3},
        {"model.block_norm": "sandwich", "parallel.schedule": "gpipe"},
    ],
)
def test_partitioned_activations_change_no_bit(comm, changes):
    changes = {"model.layers": 4, "recompute.mode": "full"} | changes
    for where in (layout(t=4), layout(t=2, p=2)):
        expected = train(comm, changes | where, steps=2)
        partitioned = changes | where | {"recompute.partition_activations": True}
        assert_same_bits(train(comm, partitioned, steps=2), expected)


@parallel(ranks=[8], limit_s=120)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pipeline_changes_no_bit_at_t_2_and_d_2(comm, precision):
    changes = {"precision.compute": precision, "model.layers": 7}
    expected = train(comm, changes | layout(t=2, d=2), steps=2)
    assert_same_bits(train(comm, changes | layout(t=2, p=2, d=2), steps=2), expected)
    assert_same_bits(train(comm, changes | layout(t=2, p=2, v=3, d=2), steps=2), expected)


@pytest.mark.cases(1)
@parallel(ranks=[4], limit_s=120)
@pytest.mark.parametrize(("precision", "batch"), [("bf16", 12), ("fp32", 4)])
def test_reproducible_sums_do_not_depend_on_d(comm, precision, batch):
    """m is 4 and 12 on one rank: a tree of the global batch that need not be complete."""
    changes = {"precision.compute": precision, "model.layers": 2, "run.reproducible": True}
    changes |= {"batch.global_size": batch, "batch.micro_size": 1}
    expected = train(comm, changes, steps=2)
    layouts = (layout(d=2), layout(d=4), layout(p=2), layout(p=2, d=2))
    for where in layouts:
        assert_same_bits(train(comm, changes | where, steps=2), expected)
    plain = train(comm, changes | {"run.reproducible": False}, steps=2)
    assert greatest_difference(plain.losses, expected.losses) < 1e-2


@parallel(ranks=[4])
def test_a_layout_repeats_itself(comm):
    changes = {"precision.compute": "bf16"} | layout(t=2, d=2)
    assert_same_bits(train(comm, changes, steps=2), train(comm, changes, steps=2))


@parallel(ranks=[2])
def test_padding_of_the_vocabulary_stays_zero(comm):
    engine = build(World(comm), {"model.layers": 2, **layout(t=2)})
    steps_of(engine, 3)
    axis = engine.axes["tensor"]
    entry = engine.buffer.entries["embedding.word.weight"]
    local = entry.view(engine.buffer.masters[0])
    held = sum(one.local.stop[0] for one in entry.declaration.held(axis.rank, axis.size))
    assert engine.axes["tensor"].all_gather_object(held) == [51, 50] and len(local) == 51
    assert not local[held:].any()
    assert local[:held].any(dim=1).all()


@pytest.mark.cases(1)
@parallel(ranks=[1, 4], limit_s=120)
@pytest.mark.parametrize("reproducible", [False, True])
def test_evaluation_is_the_mean_loss(comm, reproducible):
    layouts = [layout(p=2, v=2, d=2), layout(t=2, p=2)] if comm.size == 4 else [{}]
    for where in layouts:
        changes = {"precision.compute": "fp64", "model.dropout": 0.5, "model.layers": 4} | where
        changes |= {"run.reproducible": reproducible}
        engine = build(World(comm), changes)
        config, rank = engine.config, engine.axes["data"].rank
        found = engine.evaluate(microbatches(config, 0, rank))
        ids, mask = tokens(config, 0)
        weights = whole_weights(engine)
        loss = reference.summed_loss(weights, config.model, ids[:, :-1], ids[:, 1:], mask)
        assert found.keys() == {"task"} and found["task"].count == float(mask.sum())
        assert greatest_difference([found["task"].sum], [float(loss)]) < 1e-12

        # a validation between two steps leaves no trace in the training
        step = engine.step(0, microbatches(config, 0, rank))
        fresh = build(World(comm), changes)
        assert fresh.step(0, microbatches(config, 0, rank)).loss == step.loss
        assert torch.equal(fresh.buffer.masters[0], engine.buffer.masters[0])


@parallel(ranks=[1, 4])
def test_first_loss_is_that_of_a_uniform_guess(comm):
    """Small initial weights say nothing of the next token: log V nats."""
    run = train(comm, layout(p=comm.size) | {"model.layers": 4}, steps=1)
    assert run.losses[0] == pytest.approx(torch.tensor(float(VOCAB_SIZE)).log().item(), rel=0.01)
