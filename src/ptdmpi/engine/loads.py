"""The loads of the experts of each layer, which are the numbers of tokens of the global batch that
they get, and the balancing of the loads.

Counts are integers, so the counts and the update of the balance are the same in every layout.
Counts are sent as float64, which every transport adds, and which is exact up to 2^53.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ptdmpi.comm.world import Axes
from ptdmpi.config import ModelConfig
from ptdmpi.model.experts.mixture import Mixture
from ptdmpi.model.output.losses import TOTAL, weights
from ptdmpi.model.stage import Stage
from ptdmpi.model.state import WEIGHTS, State
from ptdmpi.plan.layout.grid import LOSSES


@dataclass(frozen=True)
class ExpertLoads:
    """The tokens [layers, E] of each expert in one step, over the global batch, as int64; and the
    losses of the routers by name, summed over the same tokens and over the layers."""

    tokens: Tensor
    losses: Mapping[str, float] = field(default_factory=dict)

    @property
    def fullest(self) -> list[float]:
        """Return for each layer the share of its fullest expert in the tokens of all experts; 1 / E
        is the least."""
        share = self.tokens.amax(1) / self.tokens.sum(1).clamp_min(1)
        values: list[float] = share.tolist()
        return values

    def with_routers(
        self, sums: Mapping[str, float], counts: Mapping[str, float]
    ) -> dict[str, float]:
        """Return sums of losses by name, to which the losses of the routers are added, also in the
        total; `counts` are the numbers of terms."""
        factors = weights(counts)
        more = sum(factors[name] * loss for name, loss in self.losses.items())
        return {**sums, **self.losses, TOTAL: sums[TOTAL] + more}

    @property
    def dead(self) -> list[int]:
        """Return for each layer the number of experts without a token."""
        counts: list[int] = (self.tokens == 0).sum(1).tolist()
        return counts


class Balance:
    """The token counts of a rank's mixtures, the sum of the counts over all ranks, and the balance
    numbers, one for each expert. With `balance` = "bias", the balance numbers are added to the
    scores by which experts are chosen (Wang et al. 2024, arXiv 2408.15664, algorithm 1). With
    "batch", they are (the expert's load in the step / the mean load) - 1."""

    def __init__(
        self, model: ModelConfig, axes: Axes, stages: Mapping[int, Stage], state: State
    ) -> None:
        self.model = model
        self.axes = axes
        self.state = state
        self.mixtures: dict[int, Mixture] = {}
        for stage in stages.values():
            self.mixtures |= stage.mixtures

    def sent(self) -> Tensor | None:
        """Sum the counts and losses of the step over all ranks; every rank calls `sent`. Return the
        sums [layers, E + losses] on the device, as float64, or None if the model has no experts."""
        if not self.model.experts:
            return None
        device = self.state.buffer.device
        names = self.model.router_losses
        shape = (self.model.layers, self.model.experts + len(names))
        every = torch.zeros(shape, dtype=torch.float64, device=device)
        for layer, mixture in self.mixtures.items():
            every[layer, : self.model.experts] = mixture.counts
            for column, name in enumerate(names, self.model.experts):
                every[layer, column] = mixture.losses[name]
        # ranks of one pipeline rank have the same layers, and tensor ranks the same counts
        self.axes[LOSSES].all_reduce(every)
        return self.axes["pipeline"].all_reduce(every)

    def read(self, sent: Tensor | None) -> ExpertLoads | None:
        """Return the loads that `sent` has returned; the host waits for the device."""
        if sent is None:
            return None
        host = sent.cpu()
        sums: list[float] = host[:, self.model.experts :].sum(0).tolist()
        losses = dict(zip(self.model.router_losses, sums, strict=True))
        return ExpertLoads(host[:, : self.model.experts].long(), losses)

    def update(self, loads: ExpertLoads, written: bool) -> None:
        """Move the balance numbers of this rank's layers, in their master weights, towards equal
        loads. If `written` is True, no later code copies the master weights to the weights, so the
        weights are written here."""
        tokens = loads.tokens
        total = tokens.sum(1, keepdim=True)
        above = tokens * self.model.experts - total
        moves = -self.model.balance_coefficient * above.sign().double()
        if self.model.balance == "batch":
            moves = above / total
        buffer = self.state.buffer
        for layer in self.mixtures:
            name = f"layers.{layer}.mlp.router.balance"
            held = self.state.kinds[WEIGHTS].held.get(name)
            if held is None:  # not kept, or held by other ranks of the shard group
                continue
            master = held.view(buffer.masters)
            if self.model.balance == "batch":
                master.zero_()
            master += moves[layer, held.begin : held.end].to(master)
            if written and not buffer.one_type:
                held.view(buffer.weight_parts).copy_(master)
