"""Replicas that differ: their mean, which is what is validated, and how far they are apart."""

import contextlib
import math
from collections.abc import Iterator

from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import Config
from ptdmpi.engine.gradients import GradientReduction
from ptdmpi.model.state import WEIGHTS, State


class Replicas:
    """The replicas of a model on the data axis, seen from one of them. Where the data-parallel
    method keeps them equal, there is nothing to do, and no message."""

    def __init__(
        self, config: Config, data: Communicator, state: State, reduction: GradientReduction
    ) -> None:
        self.config = config
        self.data = data
        self.state = state
        self.reduction = reduction
        self.differ = bool(reduction.policy.differs)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside it the weights are the mean over replicas that differ: what is validated, and
        asked. Every rank calls it, between two steps; gradients are lost."""
        if not self.differ:
            yield
            return
        try:
            with self.state.averaged(WEIGHTS):
                self.state.changed()
                yield
        finally:
            self.state.changed()

    def measured(self, step: int) -> float | None:
        """The consensus distance, where it is asked for after the update of step `step` (from 0);
        gradients are lost."""
        every = self.config.data_parallel.consensus_every
        done = step + 1
        asked = every > 0 and (done % every == 0 or done == self.config.run.steps)
        return self.consensus() if self.differ and asked else None

    def consensus(self) -> float:
        """The consensus distance: the root of the mean square, over replicas, of how far their
        weights are from the mean of all, sqrt(sum_i |x_i - mean|^2 / d); equal on all ranks. Takes
        a sum of all weights over the data axis, and the memory of the gradients, which are lost."""
        self.state.deviate()
        norm = float(self.reduction.global_norm())
        every = self.data.all_gather_object(norm)
        return math.sqrt(sum(distance * distance for distance in every) / len(every))
