"""An optimizer as a user would write it, for a kind of run that `every_kind` kills."""

from collections.abc import Sequence
from typing import Any

from ptdmpi.config.sections import OptimizerConfig


class Momentum:
    """SGD with momentum, as torch.optim.SGD computes it."""

    moments = ("own_momentum",)

    @staticmethod
    def update(config: OptimizerConfig, group: Any, rate: float, updates: int) -> None:
        """Update the weights of `group` in place, with the learning rate `rate`."""
        kept: Sequence[Any] = group.moments[0]
        for weights, gradients, momentum in zip(group.masters, group.gradients, kept, strict=True):
            momentum.mul_(config.beta1).add_(gradients)
            weights.add_(momentum, alpha=-rate)
