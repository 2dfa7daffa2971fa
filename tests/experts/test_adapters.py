"""Adapters of models with experts: on attention beside frozen experts, and on each expert."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ptdmpi.checkpoint.save import Checkpoints
from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.engine.engine import Engine
from ptdmpi.lineage.adapted import Base
from ptdmpi.lineage.judge import Before, judge_base
from ptdmpi.lineage.trained_on import synthetic
from ptdmpi.model.state import WEIGHTS
from ptdmpi.plan.cost.memory import MemoryModel
from tests._configs import Changes, layout, small
from tests._engines import (
    assert_same_bits,
    build,
    course,
    load,
    steps_of,
    train,
    whole_gradients,
    whole_weights,
)
from tests.adapters.test_engine import close, expected, merged, some_adapters
from tests.checkpoint.test_sharded import assert_whole
from tests.experts.test_expert_parallel import check, dealt, trained
from tests.experts.test_parity import GROUPED, MIXED
from tests.parallel import names, parallel

LORA = {"adapt.method": "lora", "adapt.rank": 3, "adapt.alpha": 6.0}
BESIDE = LORA | {"adapt.targets": ["attention.*"]}
INSIDE = LORA | {"adapt.targets": ["mlp.experts.*"]}
LATER = LORA | {"adapt.first_layer": 1}
FULL = {"recompute.mode": "full"}
# name -> (ranks, shape, layout and how it is run)
ROWS: dict[str, tuple[int, Changes, Changes]] = {
    "t2 beside zero 0 divided": (
        2,
        MIXED | BESIDE,
        layout(t=2) | {"parallel.sequence_parallel": True},
    ),
    "t2 grouped divided": (2, GROUPED | LORA, layout(t=2) | {"parallel.sequence_parallel": True}),
    "p2 inside zb-h1": (2, MIXED | INSIDE, layout(p=2) | {"parallel.schedule": "zb-h1"}),
    "d2 zero 3 later full": (2, MIXED | LATER, layout(d=2) | {"parallel.zero": 3} | FULL),
    "e2 d2": (2, GROUPED | LORA, dealt(2, d=2)),
    "e2 c2 beside": (2, MIXED | BESIDE, dealt(2, c=2)),
    "e2 c2 inside": (2, MIXED | INSIDE, dealt(2, c=2)),
    "e2 d4 zero 3": (4, MIXED | LORA, dealt(2, d=4) | {"parallel.zero": 3}),
    "e2 d4 zero 1 ia3": (
        4,
        MIXED | {"adapt.method": "ia3"},
        dealt(2, d=4) | {"parallel.zero": 1},
    ),
    "e2 t2 d2 divided": (
        4,
        MIXED | LORA,
        dealt(2, t=2, d=2) | {"parallel.sequence_parallel": True},
    ),
    "e2 p2 d2 zb-h1 later": (
        4,
        MIXED | LATER,
        dealt(2, p=2, d=2) | {"parallel.schedule": "zb-h1"},
    ),
    "e2 d2 p2 muon": (4, MIXED | LORA | {"optimizer.kind": "muon"}, dealt(2, p=2, d=2)),
}
SHORT = ("t2 grouped divided", "e2 c2 inside", "e2 t2 d2 divided")


@parallel(ranks=[1])
@pytest.mark.parametrize(
    "method", [LORA, pytest.param(BESIDE, marks=pytest.mark.long)], ids=["lora", "beside"]
)
def test_gradients_are_those_of_the_merged_weights(comm, method):
    changes = GROUPED | {"optimizer.clip_norm": 0.0}
    whole, adapted = (build(World(comm), changes | more) for more in ({}, method))
    base, own = whole_weights(whole), some_adapters(adapted)
    load(adapted, own)
    load(whole, merged(base, own, adapted))
    (dense,), (found,) = steps_of(whole, 1), steps_of(adapted, 1)
    assert found.loss == pytest.approx(dense.loss, rel=1e-12)
    gradients = whole_gradients(adapted)
    answer = expected(base, own, whole_gradients(whole), adapted)
    assert gradients.keys() == answer.keys()
    assert any(".experts." in name for name in answer) == ("adapt.targets" not in method)
    for name, gradient in gradients.items():
        assert close(gradient, answer[name]), name


@parallel(ranks=[4])
@names(ROWS, short=SHORT)
def test_parity_with_one_rank(comm, name):
    check(comm, ROWS[name], 3)


@parallel(ranks=[4])
@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_parity_after_twenty_steps(comm, name):
    check(comm, ROWS[name], 20)


@parallel(ranks=[3])
def test_dealt_experts_have_the_bits_of_data_parallelism(comm):
    shape = {**MIXED, **LORA, "model.experts": 6, "batch.global_size": 6}
    assert_same_bits(
        train(comm, shape | dealt(3, d=3), steps=3), train(comm, shape | layout(d=3), steps=3)
    )


@parallel(ranks=[2])
def test_routers_and_experts_stay_frozen(comm):
    """The balance does not move, and state and memory are those of adapters alone."""
    engine = build(World(comm), {**MIXED, **LORA, **dealt(2, d=2)})
    buffer = engine.buffer
    assert all(".lora_" in name for name in buffer.entries)
    assert "layers.0.mlp.router.balance" in buffer.frozen
    before = buffer.idle_weights.clone()
    steps_of(engine, 2)
    assert torch.equal(before, buffer.idle_weights)
    layout_ = engine.config.layout
    memory = MemoryModel.of(engine.config, engine.vocab_size)
    foreseen = memory.peak(layout_, 0, engine.config.microbatches)
    frozen, own = (
        sum(entry.elements for entry in entries.values())
        for entries in (buffer.frozen, buffer.entries)
    )
    assert foreseen.weights == 8 * (frozen + own)
    assert foreseen.gradients == 8 * own and foreseen.optimizer == 16 * own
    assert sum(part.numel() for part in engine.state.kinds[WEIGHTS].parts) >= own


MOVES = {
    "e2 to t2": (dealt(2, d=2), layout(t=2)),
    "d2 zero 3 to e2": (layout(d=2) | {"parallel.zero": 3}, dealt(2, d=2)),
}


def checkpoints(engine: Engine, path: Path) -> Checkpoints:
    own = course(engine.config)
    own.base = Base("base", "0" * 64)
    return Checkpoints(path, engine.state, engine.axes, own)


@parallel(ranks=[2])
@pytest.mark.parametrize(
    "name", [pytest.param("e2 to t2", marks=pytest.mark.long), "d2 zero 3 to e2"]
)
def test_a_run_goes_on_in_another_layout(comm, tmp_path, name):
    settings = MIXED | LORA
    alone = World(comm).first(1)
    straight = trained(build(alone, settings), 0, 4)[0] if alone is not None else None
    world = World(comm)
    first, second = (build(world, settings | where) for where in MOVES[name])
    curve = trained(first, 0, 2)[0]
    checkpoints(first, tmp_path).save(2)
    assert_whole(world, tmp_path / "step-00000002")
    progress, _ = checkpoints(second, tmp_path).resume("auto")
    assert progress is not None and progress.step == 2
    curve += trained(second, 2, 4)[0]
    assert curve == pytest.approx(comm.bcast(straight), rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"adapt.dropout": 0.1}, r"dropout = 0\.1 with adapters of experts \(mlp\.experts\.gate"),
        ({"model.balance": "batch"}, 'balance = "batch" adds a loss of the routers.*"none"'),
        ({"model.z_loss_coefficient": 0.1}, "z_loss_coefficient = 0.1 has no effect, because"),
        ({"model.balance_coefficient": 0.1}, "balance_coefficient = 0.1 has no effect, because"),
        ({"adapt.targets": ["mlp.up"]}, r'"mlp\.up" matches no target; .*mlp\.experts\.down'),
        (
            {"adapt.method": "ia3", "adapt.targets": ["mlp.experts.down"]},
            '"mlp.experts.down" matches no target',
        ),
    ],
)
def test_what_adapters_of_experts_do_not_do(changes, line):
    lora = {"adapt.method": "lora", "adapt.base": "base"}
    with pytest.raises(InputError, match=line):
        small(MIXED | lora | changes)


def test_whole_experts_have_no_adapters():
    where = layout(t=2) | {"parallel.expert_tensor": 1, "adapt.base": "base"}
    with pytest.raises(InputError, match=r'expert_tensor = 1 excludes adapt\.method = "lora"'):
        small(MIXED | LORA | where, 2)


def test_attention_may_drop_beside_experts():
    config = small(MIXED | BESIDE | {"adapt.base": "base", "adapt.dropout": 0.1})
    assert config.adapt.dropout == 0.1


@pytest.mark.parametrize(
    ("before", "now", "fits"),
    [("batch", "none", True), ("sequence", "none", True), ("bias", "none", False)],
)
def test_a_balance_loss_of_the_base_is_left_out(before, now, fits):
    """It changes no output; the biases of a base do."""
    config = small(MIXED | LORA | {"adapt.base": "base", "model.balance": now})
    model = config.model.model_dump() | {"balance": before}
    base = Before(Path("base"), 0, 0, 0, model, {}, None)
    with nullcontext() if fits else pytest.raises(InputError, match=r"model\.balance = bias"):
        judge_base(base, config, synthetic(config))
