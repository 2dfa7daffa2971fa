"""The loads of the experts of each layer, and the balancing of the loads. The load of an expert is
the number of tokens of the global batch that are routed to the expert. Each expert has a balance
number, which makes the load of the expert greater or smaller (see `Balance`).

Loads are integers, whose sum does not depend on the order of the terms, so the loads and the
balance numbers are the same in every layout. Loads are sent as float64, because every transport
(library that sends messages) can add float64 numbers, and float64 represents integers up to 2^53
exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ptdmpi.comm.world import Axes
from ptdmpi.config import Config
from ptdmpi.model.output.losses import TOTAL, weights
from ptdmpi.model.stage import Stage
from ptdmpi.model.state import WEIGHTS, State
from ptdmpi.plan.layer.ahead.modules import MODULES
from ptdmpi.plan.layout.grid import LOSSES, TENSOR

if TYPE_CHECKING:
    from ptdmpi.model.experts.mixture import Mixture


@dataclass(frozen=True)
class ExpertLoads:
    """The loads of the experts in one step, and the losses of the routers by name. The loads are
    int64, [layers with experts, E], for E experts per layer. The losses are summed over the tokens
    of the global batch and over the layers."""

    tokens: Tensor
    losses: Mapping[str, float] = field(default_factory=dict)

    @property
    def fullest(self) -> list[float]:
        """Return, for each layer with experts, the greatest load of an expert, divided by the sum
        of the loads of all E experts. The least possible value is 1 / E."""
        share = self.tokens.amax(1) / self.tokens.sum(1).clamp_min(1)
        values: list[float] = share.tolist()
        return values

    def with_routers(
        self, sums: Mapping[str, float], counts: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the sum of each loss by name, including the losses of the routers. `sums` has the
        sums of the other losses. The total loss of the result is the total loss in `sums` plus the
        weighted losses of the routers. `counts` has the number of terms of each loss."""
        factors = weights(counts)
        more = sum(factors[name] * loss for name, loss in self.losses.items())
        return {**sums, **self.losses, TOTAL: sums[TOTAL] + more}

    @property
    def dead(self) -> list[int]:
        """Return, for each layer with experts, how many experts got no token."""
        counts: list[int] = (self.tokens == 0).sum(1).tolist()
        return counts


class Balance:
    """The sum of expert loads over all ranks, and the update of the balance numbers of the experts.
    If the key `balance` is "bias", the balance numbers are added to the scores that determine which
    experts are chosen (Wang et al. 2024, arXiv 2408.15664, algorithm 1). If `balance` is "batch",
    the balance number of an expert is (its load in the step / the mean load) - 1. The balance loss
    of the next step is computed from these numbers."""

    def __init__(
        self, config: Config, axes: Axes, stages: Mapping[int, Stage], state: State
    ) -> None:
        """Prepare the sums for the layers with experts in `stages`."""
        self.model = config.model
        # True if a tensor rank chooses experts for its own tokens only, not for the tokens of all
        # ranks
        self.routes_apart = config.layout.dealing.whole
        self.axes = axes
        self.state = state
        self.mixtures: dict[int, Mixture] = {}
        # number of a layer with experts -> row of this layer in the tensor of the loads
        self.rows = {layer: row for row, layer in enumerate(self.model.routing_layers)}
        for stage in stages.values():
            self.mixtures |= stage.mixtures

    def sent(self) -> Tensor | None:
        """Sum the loads of the experts and the losses of the routers in this step over all ranks.
        Every rank calls this method. Return the sums [layers with experts, experts + losses] on the
        device, as float64, or None if the model has no experts."""
        if not self.model.experts:
            return None
        device = self.state.buffer.device
        names = self.model.router_losses
        shape = (len(self.rows), self.model.experts + len(names))
        every = torch.zeros(shape, dtype=torch.float64, device=device)
        for layer, mixture in self.mixtures.items():
            row = self.rows[layer]
            every[row, : self.model.experts] = mixture.counts
            for column, name in enumerate(names, self.model.experts):
                every[row, column] = mixture.losses[name]
        # sum over the ranks with the same layers first, then over the pipeline, whose other ranks
        # have zeros in the rows of these layers
        self.axes[LOSSES].all_reduce(every)
        if self.routes_apart:
            self.axes[TENSOR].all_reduce(every)
        return self.axes["pipeline"].all_reduce(every)

    def read(self, sent: Tensor | None) -> ExpertLoads | None:
        """Copy the tensor `sent`, which has the summed loads and losses of all ranks, to the host.
        Return these loads and losses, or None if `sent` is None. The host waits for the device.
        """
        if sent is None:
            return None
        host = sent.cpu()
        sums: list[float] = host[:, self.model.experts :].sum(0).tolist()
        losses = dict(zip(self.model.router_losses, sums, strict=True))
        return ExpertLoads(host[:, : self.model.experts].long(), losses)

    def _place(self, layer: int) -> str:
        """Return the prefix of the names of the parameters of layer number `layer`, such as
        "layers.0". The numbers of modules for multi-token prediction follow the number of the last
        layer."""
        module = layer - self.model.layers
        return f"layers.{layer}" if module < 0 else f"{MODULES}.{module}"

    def update(self, loads: ExpertLoads, written: bool) -> None:
        """Update the balance numbers (one bias of the router for each expert) of this rank's
        layers. The balance numbers are part of the master weights. If `written` is True, the
        optimizer has already copied the master weights to the weights, so this method also writes
        the weights."""
        tokens = loads.tokens
        total = tokens.sum(1, keepdim=True)
        above = tokens * self.model.experts - total
        moves = -self.model.balance_coefficient * above.sign().double()
        if self.model.balance == "batch":
            moves = above / total
        buffer = self.state.buffer
        for layer in self.mixtures:
            name = f"{self._place(layer)}.mlp.router.balance"
            held = self.state.kinds[WEIGHTS].held.get(name)
            # either the model has no balance numbers, or this rank's shard does not contain them
            if held is None:
                continue
            master = held.view(buffer.masters)
            if self.model.balance == "batch":
                master.zero_()
            master += moves[self.rows[layer], held.begin : held.end].to(master)
            if written and not buffer.one_type:
                held.view(buffer.weight_parts).copy_(master)
