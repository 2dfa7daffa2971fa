"""Sharding over the data axis: the same training, whatever is shared out and among how many.

Bits are equal wherever sums keep their order: with `zero` = 1 always, with 2 and 3 where a rank
has one microbatch; else microbatches are summed over ranks first, and equality is to rounding. With
groups of data ranks (hybrid) the order of the sum over the ranks is another one too.
"""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch

from ptdmpi.comm.world import World
from ptdmpi.engine import engine as engines
from ptdmpi.model.documents import Documents
from tests._configs import layout
from tests._engines import build, microbatches, steps_of, whole_weights
from tests.engine.test_frozen import PartlyFrozen
from tests.parallel import parallel

each_zero = pytest.mark.parametrize("zero", [1, 2, 3])
ONE = {"batch.micro_size": 4}  # of 4 d samples one microbatch each

DROPOUT = {"model.dropout": 0.1, "model.attention_dropout": 0.1}
SHAPES = {
    "tied": {},
    "untied": {"model.tie_embeddings": False},
    "llama": {"model.kind": "llama", "model.kv_heads": 2},
    "bert": {"model.kind": "bert", "model.seq_length": 16},
    "bf16": {"precision.compute": "bf16"},
    "fp16": {"precision.compute": "fp16", "precision.initial_loss_scale": 2.0**10},
    "fp64": {"precision.compute": "fp64"},
    "dropout": DROPOUT,
    "recomputed": {"recompute.mode": "full"},
    "dropout drawn again": {"recompute.mode": "full", **DROPOUT},
    "selective": {"recompute.mode": "selective"},
    "clipped": {"optimizer.clip_norm": 0.01},
    "uneven": {"model.hidden": 36, "model.ffn_hidden": 52},
}
# the rest in `make test-long`: they meet the walk as others do
LESS = ("fp64", "selective", "dropout", "recomputed", "untied")
SOME_OR_ALL = [
    pytest.param(shape, marks=pytest.mark.long if shape in LESS else []) for shape in SHAPES
]


def trained(world: World, changes, steps: int = 3):
    """Losses and norms of the steps, and the weights after them."""
    engine = build(world, changes)
    found = [(result.loss, result.grad_norm) for result in steps_of(engine, steps)]
    return found, whole_weights(engine)


def both(world: World, zero: int, sizes, changes):
    """Unsharded, and sharded."""
    t, p, d = (sizes.get(axis, 1) for axis in "tpd")
    plain = {**layout(**sizes), "batch.global_size": 4 * d, **ONE, **changes}
    assert t * p * d == world.size
    group = {key: plain.pop(key) for key in ("parallel.shard_group",) if key in plain}
    return trained(world, plain), trained(world, {**plain, **group, "parallel.zero": zero})


def assert_same_bits(plain, found):
    assert found[0] == plain[0]
    assert found[1].keys() == plain[1].keys()
    for name, weight in plain[1].items():
        assert torch.equal(found[1][name], weight), name


def assert_close(plain, found, tolerance):
    for (loss, norm), (their_loss, their_norm) in zip(found[0], plain[0], strict=True):
        assert loss == pytest.approx(their_loss, rel=tolerance)
        assert norm == pytest.approx(their_norm, rel=10 * tolerance)
    for name, weight in plain[1].items():
        assert torch.allclose(found[1][name], weight, rtol=0, atol=100 * tolerance), name


@pytest.mark.cases(6)
@parallel(ranks=[2])
@each_zero
@pytest.mark.parametrize("shape", SOME_OR_ALL)
def test_one_microbatch_has_the_bits_of_unsharded(comm, zero, shape):
    assert_same_bits(*both(World(comm), zero, {"d": comm.size}, SHAPES[shape]))


# of packed rows: where attention and positions begin anew
PACKED = torch.tensor([[0] * 16, [0] * 5 + [1] + [2] * 10, [4] * 8 + [3] * 8, [0] * 9 + [1] * 7])


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize("shape", ["tied", "llama", "recomputed"])
def test_documents_have_the_bits_of_unsharded(comm, shape):
    """Each rank's rows are packed otherwise."""

    def packed(zero: int):
        changes = {**layout(d=2), **ONE, **SHAPES[shape], "parallel.zero": zero}
        engine = build(World(comm), changes)
        found = []
        for step in range(2):
            (batch,) = microbatches(engine.config, step, comm.rank)
            documents = Documents.of(PACKED.roll(comm.rank + step, 0))
            result = engine.step(step, [replace(batch, documents=documents)])
            found.append((result.loss, result.grad_norm))
        return found, whole_weights(engine)

    plain = packed(0)
    for zero in (1, 2, 3):
        assert_same_bits(plain, packed(zero))
    whole = trained(World(comm), {**layout(d=2), **ONE, **SHAPES[shape]}, 2)
    assert plain[0] != whole[0]


@pytest.mark.cases(1)
@parallel(ranks=[2, 4])
def test_an_overflow_is_skipped_by_all_alike(comm):
    """fp16's scale falls and grows as unsharded, and with the same bits in one group. With 4 ranks
    there are two groups, whose sums have another order."""
    changes = {**layout(d=comm.size), **ONE, "batch.global_size": 4 * comm.size}
    changes |= {"precision.compute": "fp16", "precision.initial_loss_scale": 2.0**22}
    changes["precision.loss_scale_window"] = 2

    def scaled(more):
        engine = build(World(comm), changes | more)
        results = []
        for step in range(6):
            before = [part.clone() for part in (*engine.state.flats, *engine.buffer.weight_parts)]
            results.append(engine.step(step, microbatches(engine.config, step, comm.rank)))
            after = (*engine.state.flats, *engine.buffer.weight_parts)
            same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert same == results[-1].skipped == results[-1].overflow
        scales = [(one.loss_scale, one.skipped) for one in results]
        return scales, ([(one.loss, one.grad_norm) for one in results], whole_weights(engine))

    scales, plain = scaled({})
    assert [skipped for _, skipped in scales[:2]] == [True, True]
    assert any(later > scale for (scale, _), (later, _) in pairwise(scales))
    for zero in (1, 2, 3):
        again, found = scaled({"parallel.zero": zero, "parallel.shard_group": 2})
        assert again == scales
        if comm.size == 2:
            assert str(found[0]) == str(plain[0])  # norms that are not a number are equal, too
            assert_same_bits(([], plain[1]), ([], found[1]))
        else:
            losses = [[loss for loss, _ in one[0]] for one in (found, plain)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.cases(1)
@parallel(ranks=[4])
@each_zero
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ("recomputed", "sequence"),
        pytest.param("tied", "chunks", marks=pytest.mark.long),
        pytest.param("tied", "p", marks=pytest.mark.long),
        pytest.param("recomputed", "t", marks=pytest.mark.long),
    ],
)
def test_beside_one_other_axis(comm, zero, shape, axes):
    beside(comm, zero, shape, axes)


@parallel(ranks=[8])
@each_zero
@pytest.mark.parametrize(("shape", "axes"), [("untied", "tp"), ("bf16", "p")])
def test_beside_more(comm, zero, shape, axes):
    """d = 2 beside t = p = 2, and d = 4."""
    beside(comm, zero, shape, axes)


def beside(comm, zero, shape, axes):
    sizes = {
        "t": 2 * ("t" in axes or axes == "sequence"),
        "p": 2 * ("p" in axes or axes == "chunks"),
    }
    sizes = {axis: size or 1 for axis, size in sizes.items()}
    sizes["d"] = comm.size // (sizes["t"] * sizes["p"])
    changes = dict(SHAPES[shape])
    if axes == "sequence":
        changes["parallel.sequence_parallel"] = True
    if axes == "chunks":
        sizes["v"], changes["model.layers"] = 2, 4
        changes |= {"batch.global_size": 8 * sizes["d"]}
    if axes == "chunks" and zero > 1:
        changes |= {"precision.compute": "fp64"}
        assert_close(*both(World(comm), zero, sizes, changes), 1e-12)
    else:
        assert_same_bits(*both(World(comm), zero, sizes, changes))


@pytest.mark.cases(1)
@parallel(ranks=[4])
@each_zero
def test_several_microbatches_are_equal_to_rounding(comm, zero):
    changes = {"precision.compute": "fp64", "batch.micro_size": 1}
    found = both(World(comm), zero, {"d": 4}, changes)
    assert_close(*found, 1e-12)
    if zero == 1:
        assert_same_bits(*found)


@pytest.mark.cases(1)
@parallel(ranks=[4])
@each_zero
def test_groups_that_hold_copies_of_each_other(comm, zero):
    """Hybrid: cut in two within a group, and copied between the groups."""
    changes = {"precision.compute": "fp64", "parallel.shard_group": 2}
    assert_close(*both(World(comm), zero, {"d": comm.size}, changes), 1e-12)


@pytest.mark.cases(1)
@parallel(ranks=[2, 4])
def test_reproducible_with_sharded_optimizer(comm):
    changes = {"run.reproducible": True, "batch.micro_size": 1}
    assert_same_bits(*both(World(comm), 1, {"d": comm.size}, changes))


@pytest.mark.cases(1)
@parallel(ranks=[4])
@pytest.mark.parametrize(
    ("zero", "sizes", "changes"),
    [
        # a tied table at both ends
        (3, {"p": 2, "d": 2}, {}),
        # one key head for both tensor ranks
        (3, {"t": 2, "d": 2}, {"model.kind": "llama", "model.kv_heads": 1}),
        (2, {"t": 2, "d": 2}, {"model.kind": "bert", "parallel.sequence_parallel": True}),
        (1, {"p": 2, "d": 2}, {"parallel.schedule": "gpipe", "batch.micro_size": 2}),
    ],
)
def test_numbers_are_equal_to_rounding(comm, zero, sizes, changes):
    found = both(World(comm), zero, sizes, {"precision.compute": "fp64", **changes})
    assert_close(*found, 1e-12)


@pytest.mark.cases(1)
@parallel(ranks=[4])
@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", 1), ("zb-v", 2)])
def test_split_backwards_with_sharded_optimizer(comm, schedule, chunks):
    sizes = {"p": 2, "v": chunks, "d": 2}
    changes = {"parallel.schedule": schedule, "batch.micro_size": 1, "model.layers": 4}
    assert_same_bits(*both(World(comm), 1, sizes, changes))


@parallel(ranks=[1])
@each_zero
def test_one_data_rank_has_nobody_to_share_with(comm, zero):
    assert_same_bits(*both(World(comm), zero, {}, {}))


@parallel(ranks=[2])
@each_zero
def test_what_does_not_train_stays_whole(comm, zero):
    with patch.object(engines, "Stage", PartlyFrozen):
        assert_same_bits(*both(World(comm), zero, {"d": 2}, {}))


@parallel(ranks=[2])
@each_zero
def test_evaluation_between_steps(comm, zero):
    """Its losses are those of unsharded, and the steps behind it are not disturbed."""
    losses = []
    for changes in ({}, {"parallel.zero": zero}):
        engine = build(World(comm), {**layout(d=2), **ONE, **changes})
        batches = microbatches(engine.config, 0, engine.axes["data"].rank)
        mine = [engine.evaluate(batches)["task"].mean]
        mine += [result.loss for result in steps_of(engine, 1)]
        mine += [engine.evaluate(batches)["task"].mean, engine.step(1, batches).loss]
        losses.append(mine)
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][2]
