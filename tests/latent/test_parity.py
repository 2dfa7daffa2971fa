"""Multi-head latent attention in every layout: the training of one rank."""

import pytest

from ptdmpi.comm.world import World
from tests._configs import layout
from tests._engines import assert_same_bits, build, from_root, train
from tests.checkpoint.test_sharded import assert_whole, checkpoints, saved, sharded, stepped
from tests.engine.test_engine import check_close
from tests.parallel import parallel

LATENT = {
    "model.kind": "deepseek",
    "model.layers": 2,
    "model.ffn_hidden": 48,
    "model.head_size": 12,
    "model.rope_head_size": 4,
    "model.value_head_size": 6,
    "model.q_lora_rank": 14,
    "model.kv_lora_rank": 10,
    "precision.compute": "fp64",
}
DIRECT = {
    **LATENT,
    "model.q_lora_rank": 0,
    "model.value_head_size": 12,
    "model.bias": "attention",
}
# as in DeepSeek-V3: a first layer with a plain MLP, and experts of the best groups
WITH_EXPERTS = {
    **LATENT,
    "model.dense_layers": 1,
    "model.expert_hidden": 16,
    "model.experts": 4,
    "model.experts_per_token": 2,
    "model.shared_experts": 1,
    "model.router": "sigmoid",
    "model.router_groups": 2,
    "model.router_scale": 2.5,
}
DIVIDED = {"parallel.sequence_parallel": True}
PAIRS = {
    "t2": layout(t=2),
    "t2 divided": {**layout(t=2), **DIVIDED},
    "p2": layout(p=2),
    "d2": layout(d=2),
    "zero 1": {**layout(d=2), "parallel.zero": 1},
    "zero 3": {**layout(d=2), "parallel.zero": 3},
}
# t = p = 2: every kind of backward
FOURS = {
    "recomputed": {**DIVIDED, "recompute.mode": "full"},
    "interleaved": {"parallel.virtual": 2, "model.layers": 4, "recompute.mode": "selective"},
    "split": {"parallel.schedule": "zb-h1", **DIVIDED},
}


@pytest.mark.cases(5)
@parallel(ranks=[2])
@pytest.mark.parametrize("name", PAIRS)
def test_two_ranks_train_as_one(comm, name):
    check_close(comm, LATENT, PAIRS[name], steps=2)


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize("name", ["t2 divided", "p2", "zero 3"])
def test_queries_that_are_not_compressed_train_as_on_one_rank(comm, name):
    check_close(comm, DIRECT, PAIRS[name], steps=2)


@pytest.mark.cases(1)
@parallel(ranks=[4])
@pytest.mark.parametrize("name", FOURS)
def test_four_ranks_train_as_one(comm, name):
    more = FOURS[name]
    shape = {key: value for key, value in more.items() if key.startswith("model.")}
    check_close(comm, LATENT | shape, {**layout(t=2, p=2), **more}, steps=2)


@pytest.mark.cases(1)
@parallel(ranks=[2])
@pytest.mark.parametrize(
    "where",
    [{**layout(t=2), **DIVIDED}, {**layout(d=2), "parallel.expert": 2, "parallel.zero": 3}],
    ids=["t2", "e2"],
)
def test_it_trains_beside_experts(comm, where):
    check_close(comm, WITH_EXPERTS, where, steps=2)


@parallel(ranks=[2])
def test_muon_updates_each_compressing_matrix(comm):
    check_close(comm, {**LATENT, "optimizer.kind": "muon"}, {**layout(t=2), **DIVIDED}, steps=2)


@pytest.mark.cases(1)
@parallel(ranks=[1])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_does_not_change_a_bit(comm, mode):
    changes = {**LATENT, "precision.compute": "bf16"}
    assert_same_bits(train(comm, changes | {"recompute.mode": mode}), train(comm, changes))


@parallel(ranks=[2])
def test_a_run_goes_on_in_another_layout(comm, tmp_path):
    alone = World(comm).first(1)
    straight = stepped(build(alone, LATENT), 0, 4) if alone is not None else None
    expected = from_root(comm, straight)
    world = World(comm)
    first = build(world, {**LATENT, **layout(t=2), **DIVIDED})
    found = stepped(first, 0, 2)
    assert_whole(world, saved(first, tmp_path, 2))
    second = build(world, {**LATENT, **sharded(3, d=2)})
    progress, _ = checkpoints(second, tmp_path).resume("auto")
    assert progress is not None and progress.step == 2
    found += stepped(second, 2, 4)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-12), step
