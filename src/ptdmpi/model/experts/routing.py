"""The choice of experts for each token, and their weights, from the outputs of the router.

Everything is in float32 at least. The choice is an integer, and no sum over tokens is in it, so it
depends on a token's own activation alone.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ptdmpi.config import ModelConfig

LEAST_SUM = 1e-20  # is added to a sum of weights, so that it is never 0


@dataclass(frozen=True)
class Routing:
    """The rule by which a router chooses, as [model] describes it."""

    model: ModelConfig

    def scores(self, logits: Tensor) -> Tensor:
        """Return the scores [T, E] of all experts for the router's outputs [T, E]."""
        if self.model.router == "sigmoid":
            return logits.sigmoid()
        return logits.softmax(-1)

    def choose(self, scores: Tensor, balance: Tensor | None = None) -> Tensor:
        """Return the numbers [T, k] of each token's experts, the best first. Under the balance
        "bias" the numbers `balance` [E] are added to their scores [T, E] for this.

        Of equal scores the lower number is first: `torch.topk` promises no order of them. Only
        experts of the best groups are chosen (DeepSeek-AI 2024, arXiv 2412.19437, section 2.1.2).
        """
        scores = scores.detach()
        if balance is not None and self.model.balance == "bias":
            scores = scores + balance.to(scores.dtype)
        if self.model.router_groups > 1:
            scores = self._of_best_groups(scores)
        ranked = scores.argsort(dim=-1, descending=True, stable=True)
        return ranked[:, : self.model.experts_per_token].contiguous()

    def _of_best_groups(self, scores: Tensor) -> Tensor:
        """Return the scores, -inf outside of the best groups of each token."""
        groups = self.model.router_groups
        by_group = scores.unflatten(-1, (groups, -1))  # [T, groups, experts of a group]
        # DeepSeek-V2 takes the best expert of a group (arXiv 2405.04434, section 2.1.2), V3 the sum
        # of the best two
        best = by_group.amax(-1)
        if self.model.router == "sigmoid":
            best = by_group.sort(dim=-1, descending=True).values[..., :2].sum(-1)
        ranked = best.argsort(dim=-1, descending=True, stable=True)
        dropped = ranked[:, self.model.router_top_groups :]
        hidden = torch.zeros_like(best, dtype=torch.bool).scatter(-1, dropped, True)
        return by_group.masked_fill(hidden.unsqueeze(-1), -torch.inf).flatten(-2)

    def weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the weights [T, k] of the chosen experts [T, k], given all scores [T, E]."""
        weights = scores.gather(-1, chosen)
        if self.model.router_normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
        return weights * self.model.router_scale

    def losses(
        self, logits: Tensor, chosen: Tensor, sequences: int, balance: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the router's losses by name, each summed over the microbatch and multiplied by its
        coefficient, given its outputs [T, E] at the positions [s, sequences], one after another.

        The choice [T, k] counts as constant, and so do the numbers `balance` [E]. A loss is a sum
        over sequences or over tokens, so that no layout changes its meaning.
        """
        model = self.model
        shares = self.scores(logits)
        if model.router == "sigmoid":
            shares = shares / shares.sum(-1, keepdim=True)
        found: dict[str, Tensor] = {}
        for name in model.router_losses:
            match name:
                case "sequence_balance":
                    loss = model.balance_coefficient * _by_sequence(shares, chosen, sequences)
                case "batch_balance":
                    # Fedus et al. 2021 (arXiv 2101.03961), equations 4 to 6, with the loads of the
                    # previous global batch: 1 + balance are E times the shares of experts in it
                    assert balance is not None, "the loads of the previous step"
                    loads = 1.0 + balance.to(shares.dtype)
                    loss = model.balance_coefficient * (shares * loads).sum()
                case _:  # Zoph et al. 2022 (arXiv 2202.08906), equation 5
                    loss = model.z_loss_coefficient * logits.logsumexp(-1).square().sum()
            found[name] = loss
        return found


def _by_sequence(shares: Tensor, chosen: Tensor, sequences: int) -> Tensor:
    """Return the balance loss of each sequence, summed over these (DeepSeek-AI 2024, arXiv
    2412.19437, equations 17 to 20), for shares [T, E] and a choice [T, k]."""
    experts, each = shares.shape[1], chosen.shape[1]
    is_chosen = torch.zeros_like(shares).scatter(-1, chosen, 1.0)
    loads = is_chosen.view(-1, sequences, experts).mean(0)
    means = shares.view(-1, sequences, experts).mean(0)
    return (loads * means).sum() * experts / each


class Chosen:
    """The experts that one layer has chosen for one microbatch, for its recomputation: a second
    choice could differ in a last bit, and with it in an expert. None until they are chosen.
    `losses` are those of the router by name, if they are trained."""

    def __init__(self) -> None:
        self.indices: Tensor | None = None
        self.losses: dict[str, Tensor] = {}


class Segment(NamedTuple):
    """The tokens of one expert, ascending: their rows, and the places of the pairs (token, expert)
    in a flat [T k]."""

    expert: int
    rows: Tensor
    pairs: Tensor


def segments(chosen: Tensor, experts: int) -> list[Segment]:
    """Return the segments of all experts that have tokens, ascending, for the choice [T, k]. The
    host waits for the numbers of tokens."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts: list[int] = flat.bincount(minlength=experts).tolist()
    each = chosen.shape[1]
    return [
        Segment(expert, pairs // each, pairs)
        for expert, pairs in enumerate(order.split(counts))
        if len(pairs)
    ]
