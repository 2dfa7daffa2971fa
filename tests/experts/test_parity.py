"""Mixture of experts in every layout: the training of one rank."""

import pytest

from tests._configs import layout
from tests._engines import assert_same_bits, train
from tests.engine.test_engine import check_close
from tests.parallel import parallel

MIXED = {
    "model.kind": "llama",
    "model.layers": 2,
    "model.expert_hidden": 16,
    "model.experts": 4,
    "model.experts_per_token": 2,
    "precision.compute": "fp64",
}
# as in DeepSeek-V3, and an expert that every token uses
GROUPED = {
    **MIXED,
    "model.experts": 8,
    "model.router": "sigmoid",
    "model.router_groups": 4,
    "model.router_top_groups": 2,
    "model.router_scale": 2.5,
    "model.shared_experts": 1,
}


PAIRS = [
    layout(t=2),
    layout(p=2),
    *({**layout(d=2), "parallel.zero": zero} for zero in range(4)),
]
# of four ranks, t = p = 2: every kind of backward, and sequences divided between blocks
FOURS = [
    {"parallel.sequence_parallel": True, "recompute.mode": "full"},
    {"parallel.virtual": 2, "model.layers": 4, "recompute.mode": "selective"},
    {"parallel.schedule": "zb-h1", "parallel.sequence_parallel": True},
]


@parallel(ranks=[2])
def test_two_ranks_train_as_one(comm):
    for where in PAIRS:
        check_close(comm, MIXED, where)


@pytest.mark.cases(1)
@parallel(ranks=[4])
@pytest.mark.parametrize(
    "more",
    [FOURS[0], pytest.param(FOURS[1], marks=pytest.mark.long), FOURS[2]],
    ids=["recomputed", "interleaved", "split"],
)
def test_four_ranks_train_as_one(comm, more):
    shape = {key: value for key, value in more.items() if key.startswith("model.")}
    check_close(comm, GROUPED | shape, {**layout(t=2, p=2), **more})


@pytest.mark.cases(1)
@parallel(ranks=[1])
@pytest.mark.parametrize("mode", ["full", pytest.param("selective", marks=pytest.mark.long)])
def test_recomputation_does_not_change_a_bit(comm, mode):
    """It keeps the choice of experts."""
    changes = {**GROUPED, "precision.compute": "bf16"}
    plain = train(comm, changes)
    assert_same_bits(train(comm, changes | {"recompute.mode": mode}), plain)


@parallel(ranks=[2])
def test_muon_updates_each_expert_as_a_matrix(comm):
    changes = {**MIXED, "optimizer.kind": "muon"}
    check_close(comm, changes, layout(t=2))
