"""The choice of experts: ties, groups, and what neither other tokens nor recomputation change."""

from unittest.mock import patch

import torch

from ptdmpi.comm.world import World
from ptdmpi.model.experts.mixture import MixturePass
from ptdmpi.model.experts.routing import Routing, segments
from tests._configs import small
from tests._engines import build, steps_of
from tests.experts.test_parity import GROUPED
from tests.parallel import parallel


def routing(**keys) -> Routing:
    changes = {"model.kind": "llama", "model.experts": 8, "model.experts_per_token": 2}
    return Routing(small(changes | {f"model.{key}": value for key, value in keys.items()}).model)


def test_of_equal_scores_the_lower_number_is_first():
    """`torch.topk` promises no order: of 64 equal scores it has chosen 42 and 43."""
    rule = routing(experts=64)
    assert rule.choose(torch.full((5, 64), 0.25)).tolist() == [[0, 1]] * 5


def test_groups_without_the_best_experts_are_left_out():
    """Group 1 has the single best expert, group 3 the best two."""
    scores = torch.tensor([[0.1, 0.1, 0.9, 0.0, 0.2, 0.2, 0.6, 0.5]])
    by_best = routing(router_groups=4, router_top_groups=1)
    assert by_best.choose(scores).tolist() == [[2, 3]]
    by_two = routing(router_groups=4, router_top_groups=1, router="sigmoid")
    assert by_two.choose(scores).tolist() == [[6, 7]]


def test_weights_are_shares_times_the_scale():
    scores = torch.tensor([[0.5, 0.3, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    chosen = torch.tensor([[0, 1]])
    normalized = routing(router_scale=2.0).weights(scores, chosen)
    torch.testing.assert_close(normalized, torch.tensor([[1.25, 0.75]], dtype=torch.float64))
    plain = routing(router_normalize=False).weights(scores, chosen)
    assert torch.equal(plain, scores[:, :2])


def test_every_token_is_with_each_of_its_experts_once():
    chosen = torch.tensor([[2, 0], [0, 7], [2, 7]])
    held = [(part.expert, part.rows.tolist(), part.pairs.tolist()) for part in segments(chosen, 8)]
    assert held == [(0, [0, 1], [1, 2]), (2, [0, 2], [0, 4]), (7, [1, 2], [3, 5])]


@parallel(ranks=[1])
def test_the_router_computes_in_float32(comm):
    """A product in bf16 differs by about 1e-3."""
    engine = build(World(comm), GROUPED | {"precision.compute": "bf16"})
    right = MixturePass.logits
    differences = []

    def compared(layer: MixturePass, rows: torch.Tensor) -> torch.Tensor:
        logits, weight = right(layer, rows), layer.router.weight
        assert rows.dtype == weight.dtype == torch.bfloat16
        assert logits.dtype == torch.float32
        expected = rows.double() @ weight.double().t()
        differences.append(((logits - expected).abs().max() / expected.abs().max()).item())
        return logits

    with patch.object(MixturePass, "logits", compared):
        steps_of(engine, 1)
    assert len(differences) == 2 * engine.config.microbatches, "one for each layer"
    assert max(differences) < 1e-6


@parallel(ranks=[1])
def test_recomputation_never_routes_again(comm):
    """It would choose the same experts here: on one machine recomputed scores have equal bits."""
    for mode in ("none", "full", "selective"):
        engine = build(World(comm), GROUPED | {"recompute.mode": mode})
        with patch.object(Routing, "choose", autospec=True, side_effect=Routing.choose) as choose:
            steps_of(engine, 1)
        assert choose.call_count == 2 * engine.config.microbatches, mode
