"""The choice of experts: ties, groups, and what neither other tokens nor recomputation change."""

import torch

from ptdmpi.model.experts.routing import Routing, segments
from tests._configs import small


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
