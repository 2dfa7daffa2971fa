"""Loads of experts over the whole global batch, and the balance that follows from them."""

import pytest
import torch

from ptdmpi.comm.world import World
from ptdmpi.engine.loads import ExpertLoads
from tests import _reference as reference
from tests._configs import layout
from tests._engines import (
    build,
    from_root,
    load,
    microbatches,
    steps_of,
    whole_gradients,
    whole_weights,
)
from tests.engine.test_engine import check_close
from tests.experts.test_parity import MIXED
from tests.parallel import parallel

RATE = 0.01
BALANCED = {**MIXED, "model.balance_coefficient": RATE, "model.experts_per_token": 1}
BALANCED |= {"model.router_normalize": False}
STEPS = 3


def trained(world: World, changes) -> tuple[list[list[list[int]]], dict[int, torch.Tensor]]:
    """The loads of some steps, and the balance of each layer afterwards."""
    engine = build(world, changes)
    loads = [result.loads.tokens.tolist() for result in steps_of(engine, STEPS)]
    weights = whole_weights(engine)
    layers = range(engine.config.model.layers)
    return loads, {layer: weights[f"layers.{layer}.mlp.router.balance"] for layer in layers}


def expected_balance(loads: list[list[list[int]]], layer: int) -> torch.Tensor:
    """The sum over steps of the signs of (mean - load), one at a time."""
    balance = torch.zeros(4, dtype=torch.float64)
    for step in loads:
        mean = sum(step[layer]) / 4
        for expert, tokens in enumerate(step[layer]):
            balance[expert] += RATE * ((tokens < mean) - (tokens > mean))
    return balance


@parallel(ranks=[1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_every_layout_counts_and_balances_alike(comm):
    """Recomputation counts no token twice, and tensor ranks count each token once."""
    cases = {
        1: [layout(), {"recompute.mode": "full"}],
        2: [layout(t=2), layout(p=2), *({**layout(d=2), "parallel.zero": z} for z in (0, 2, 3))],
        4: [layout(t=2, d=2) | {"recompute.mode": "full"}],
    }
    alone = World(comm).first(1)
    expected = from_root(comm, trained(alone, BALANCED) if alone is not None else None)
    loads, balance = expected
    assert all(sum(layer) == 8 * 16 for step in loads for layer in step), "tokens of a global batch"
    for layer, values in balance.items():
        torch.testing.assert_close(values, expected_balance(loads, layer), rtol=1e-12, atol=0)
        assert values.any()
    for where in cases[comm.size]:
        found = trained(World(comm), BALANCED | where)
        assert found[0] == loads
        for layer, values in balance.items():
            assert torch.equal(found[1][layer], values), (where, layer)


@parallel(ranks=[1])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "lion"])
def test_no_optimizer_moves_it(comm, kind):
    changes = {**BALANCED, "optimizer.kind": kind, "optimizer.weight_decay": 0.1}
    loads, balance = trained(World(comm), changes)
    for layer, values in balance.items():
        torch.testing.assert_close(values, expected_balance(loads, layer), rtol=1e-12, atol=0)


@pytest.mark.long
@parallel(ranks=[1])
def test_it_makes_loads_more_equal(comm):
    """Expert 0 begins as every token's favourite."""
    engine = build(World(comm), {**MIXED, "model.balance_coefficient": 0.01})
    weights = whole_weights(engine)
    for layer in range(engine.config.model.layers):
        weights[f"layers.{layer}.mlp.router.balance"][0] = 0.2
    load(engine, weights)
    fullest = [max(result.loads.fullest) for result in steps_of(engine, 30)]
    assert fullest[0] == 0.5, "each token has two experts"
    assert fullest[-1] < 0.4


def test_shares_and_dead_experts():
    loads = ExpertLoads(torch.tensor([[6, 2, 0, 0], [2, 2, 2, 2]]))
    assert loads.fullest == [0.75, 0.25]
    assert loads.dead == [2, 0]


LOSSES = {
    "sequence": {**MIXED, "model.balance": "sequence", "model.balance_coefficient": 0.1},
    "batch": {
        **MIXED,
        "model.balance": "batch",
        "model.balance_coefficient": 0.1,
        "model.z_loss_coefficient": 0.01,
        "model.router": "sigmoid",
    },
}


@pytest.mark.cases(1)
@parallel(ranks=[2, 4])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "batch" else pytest.mark.long) for name in LOSSES],
)
def test_losses_of_routers_mean_the_same_in_every_layout(comm, name):
    wheres = {
        2: [layout(t=2), layout(d=2)],
        4: [layout(t=2, p=2) | {"recompute.mode": "full", "parallel.sequence_parallel": True}],
    }
    for where in wheres[comm.size]:
        check_close(comm, LOSSES[name], where)


def serial_losses(
    engine, batch, before: torch.Tensor | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The losses of the only layer's router by name, by their formulas, and its weight. `before`
    has the loads of the four experts in the previous step; None without such a step."""
    model = engine.config.model
    weights = {name: value.clone() for name, value in whole_weights(engine).items()}
    router = weights["layers.0.mlp.router.weight"].requires_grad_()
    ids = batch.inputs.t()
    x = torch.nn.functional.embedding(ids, weights["embedding.word.weight"])
    x = x + reference.attention(
        weights,
        "layers.0.attention",
        reference.norm(weights, "layers.0.attention_norm", x, model),
        model,
    )
    logits = reference.norm(weights, "layers.0.mlp_norm", x, model) @ router.t()  # [b, s, E]
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(logits).scatter(-1, logits.topk(2, -1).indices, 1.0)
    sequence = 4 / 2 * (chosen.mean(1) * probabilities.mean(1)).sum()
    # Fedus et al. 2021, equation 4: the sum over experts of their shares of the loads times their
    # mean probabilities, times the number of experts
    shares = (
        torch.full((4,), 0.25, dtype=torch.float64) if before is None else before / before.sum()
    )
    batch_sum = 4 * ids.numel() * (shares * probabilities.mean((0, 1))).sum()
    z = logits.logsumexp(-1).square().sum()
    losses = {"sequence_balance": sequence, "batch_balance": batch_sum}
    return {**{name: 0.1 * loss for name, loss in losses.items()}, "router_z": 0.01 * z}, router


PLAIN = {**MIXED, "model.layers": 1, "model.balance": "none", "batch.global_size": 2}
PLAIN |= {"optimizer.clip_norm": 0.0}
TRAINED = {**PLAIN, "model.balance_coefficient": 0.1, "model.z_loss_coefficient": 0.01}
# name -> the number of terms of the loss of two sequences of 16 tokens
COUNTS = {"sequence_balance": 2, "batch_balance": 2 * 16, "router_z": 2 * 16}


@pytest.mark.parametrize(("kind", "steps"), [("sequence", 1), ("batch", 3)])
@parallel(ranks=[1])
def test_losses_of_routers_are_their_formulas(comm, kind, steps):
    """Their means are in the loss of a step, and their gradients in the router's. The balance of
    the whole batch takes the loads of the step before, which are unequal."""
    engine = build(World(comm), {**TRAINED, "model.balance": kind})
    without = build(World(comm), PLAIN)
    counts = {name: COUNTS[name] for name in (f"{kind}_balance", "router_z")}
    loads = None
    for step in range(steps):
        load(without, whole_weights(engine))
        (batch,) = microbatches(engine.config, step, 0)
        losses, router = serial_losses(engine, batch, loads)
        more = sum(losses[name] / count for name, count in counts.items())
        more.backward()
        result, other = engine.step(step, [batch]), without.step(step, [batch])
        assert result.losses.keys() - other.losses.keys() == counts.keys()
        for name, count in counts.items():
            assert result.losses[name].count == count
            assert result.losses[name].sum == pytest.approx(losses[name].item(), rel=1e-12)
        assert result.loss == pytest.approx(other.loss + more.item(), rel=1e-12)
        key = "layers.0.mlp.router.weight"
        added = whole_gradients(engine)[key] - whole_gradients(without)[key]
        torch.testing.assert_close(added, router.grad, rtol=1e-9, atol=1e-14)
        loads = result.loads.tokens[0].double()
        assert len(loads.unique()) > 1
