"""The choice of experts for each token, and the weights of the chosen experts, computed from the
outputs of the router. In the shapes below, T is the number of tokens, E is the number of experts,
and k is the number of experts of a token.

All computations are in float32 or a wider type. The choice of a token's experts uses no sum over
tokens, so it depends only on the token's own activation.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import ModelConfig

LEAST_SUM = 1e-20  # added to a sum of weights, so that the sum is never 0


@dataclass(frozen=True)
class Routing:
    """The rule by which a router chooses experts, according to the section [model] of the
    configuration."""

    model: ModelConfig

    def scores(self, logits: Tensor) -> Tensor:
        """Return the scores [T, E] of all E experts for T tokens, given the router's outputs
        `logits` [T, E]: their sigmoid or their softmax."""
        if self.model.router == "sigmoid":
            return logits.sigmoid()
        return logits.softmax(-1)

    def choose(self, scores: Tensor, balance: Tensor | None = None) -> Tensor:
        """Return the numbers [T, k] of each token's experts, in descending order of their scores
        [T, E]. If the key `balance` is "bias", the balance numbers `balance` [E] are added to the
        scores before the choice.

        If scores are equal, the expert with the lower number comes first. `torch.topk` is not used,
        because it does not specify the order of equal scores. With `router_groups` > 1, only
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
        """Return the scores [T, E], with -inf in place of the scores of experts outside the token's
        best groups. The experts are divided into `router_groups` groups; the `router_top_groups`
        groups with the best scores are the token's best groups."""
        groups = self.model.router_groups
        by_group = scores.unflatten(-1, (groups, -1))  # [T, groups, experts of a group]
        # DeepSeek-V2 rates a group by the score of its best expert (arXiv 2405.04434, section
        # 2.1.2), and DeepSeek-V3 by the sum of the two best scores
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
        self, logits: Tensor, loads: "SequenceLoads | None", balance: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the router's losses by name, each summed over the T tokens and multiplied by its
        coefficient. The losses are computed from the router's outputs `logits` [T, E]. The T tokens
        are the positions [s, b] of b sequences in row-major order.

        `loads` (needed only for a balance loss of each sequence) and the balance numbers `balance`
        [E] are constants: the losses have no gradient with respect to them. Each loss is a sum over
        tokens, so the sum over the ranks that have the tokens is the same in every layout.
        """
        model = self.model
        shares = self.scores(logits)
        if model.router == "sigmoid":
            shares = shares / shares.sum(-1, keepdim=True)
        losses: dict[str, Tensor] = {}
        for name in model.router_losses:
            match name:
                case "sequence_balance":
                    assert loads is not None, "this loss needs the loads of each sequence"
                    loss = model.balance_coefficient * loads.loss(shares)
                case "batch_balance":
                    # Fedus et al. 2021 (arXiv 2101.03961), equations 4 to 6, but with the loads of
                    # the previous global batch: 1 + balance is an expert's load in that batch / the
                    # mean load
                    assert balance is not None, "this loss needs the loads of the previous step"
                    relative = 1.0 + balance.to(shares.dtype)
                    loss = model.balance_coefficient * (shares * relative).sum()
                case _:  # the z-loss of Zoph et al. 2022 (arXiv 2202.08906), equation 5
                    loss = model.z_loss_coefficient * logits.logsumexp(-1).square().sum()
            losses[name] = loss
        return losses


class SequenceLoads(NamedTuple):
    """The experts' loads in each of b sequences: `counts` [b, E] float64 has the number of tokens
    of the sequence that are routed to the expert. A sequence has `positions` tokens, and each token
    has `each` experts. This rank may have only some of the tokens of a sequence."""

    counts: Tensor
    positions: int
    each: int

    @classmethod
    def of(cls, chosen: Tensor, experts: int, sequences: int) -> Self:
        """Return the loads of the experts in each sequence. `chosen` [T, k] has the experts of T
        tokens, which are the positions [s, sequences] in row-major order."""
        tokens, each = chosen.shape
        sequence = torch.arange(tokens, device=chosen.device) % sequences
        pairs = (sequence.unsqueeze(-1) * experts + chosen).flatten()
        counts = pairs.new_zeros(sequences * experts).scatter_add_(0, pairs, torch.ones_like(pairs))
        return cls(counts.view(sequences, experts).double(), tokens // sequences, each)

    def summed(self, comm: Communicator) -> Self:
        """Return the loads over the tokens of all ranks of `comm`. Each of these ranks has other
        tokens of the same sequences, and all ranks have equally many tokens. The counts are
        integers, so their sum is exact. The sum overwrites `counts` of this object."""
        comm.all_reduce(self.counts)
        return self._replace(positions=self.positions * comm.size)

    def loss(self, shares: Tensor) -> Tensor:
        """Return the balance loss of each sequence, summed over sequences (DeepSeek-AI 2024, arXiv
        2412.19437, equations 17 to 20). `shares` [T, E] has the normalized scores of this rank's
        tokens. The loss is linear in `shares`, so it is a sum over ranks: each rank computes the
        terms of its own tokens."""
        sequences, experts = self.counts.shape
        loads = (self.counts / self.positions).to(shares.dtype)
        means = shares.view(-1, sequences, experts).sum(0) / self.positions
        return (loads * means).sum() * experts / self.each


class Chosen:
    """The experts that one layer has chosen for one microbatch, stored for recomputation. If the
    recomputation chose experts anew, it might choose different experts, because recomputed scores
    may differ in the last bit. `indices` is None until the experts are chosen. `losses` has the
    router's losses by name, if they contribute to the gradient."""

    def __init__(self) -> None:
        self.indices: Tensor | None = None
        self.losses: dict[str, Tensor] = {}


class Segment(NamedTuple):
    """The tokens of one expert, in ascending order. `rows` has the numbers of the tokens. A tensor
    [T, k] has one element for each token and each of its k experts; `pairs` has the indices of this
    expert's elements in the flattened tensor."""

    expert: int
    rows: Tensor
    pairs: Tensor


def segments(chosen: Tensor, experts: int) -> list[Segment]:
    """Return the segments of all experts that have tokens, in ascending order of experts. `chosen`
    [T, k] has the experts of each token. The host waits for the device to count the tokens."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts: list[int] = flat.bincount(minlength=experts).tolist()
    each = chosen.shape[1]
    return [
        Segment(expert, pairs // each, pairs)
        for expert, pairs in enumerate(order.split(counts))
        if len(pairs)
    ]
