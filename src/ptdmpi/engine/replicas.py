"""Replicas of the model that may differ: the mean of the replicas, which is used for validation,
and the distance of the replicas from their mean."""

import contextlib
import math
from collections.abc import Iterator

from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import Config
from ptdmpi.engine.gradients import GradientReduction
from ptdmpi.model.state import WEIGHTS, State


class Replicas:
    """This rank's view of the replicas of a model on the data axis. If all replicas are always
    equal, the methods of this class send nothing and change nothing."""

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
        """Return a context in which the weights are the mean over all replicas, for validation and
        evaluation. Every rank calls this method, between two steps. The gradients are overwritten.
        """
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
        """If the run measures the consensus distance after step `step` (from 0), return this
        distance; otherwise return None. The gradients are overwritten."""
        every = self.config.data_parallel.consensus_every
        done = step + 1
        asked = every > 0 and (done % every == 0 or done == self.config.run.steps)
        return self.consensus() if self.differ and asked else None

    def consensus(self) -> float:
        """Return the consensus distance, which is equal on all ranks. It is the root mean square,
        over the d replicas, of the distance of a replica's weights x_i from the mean of all
        replicas: sqrt(sum_i |x_i - mean|^2 / d). The computation all-reduces all weights over the
        data axis. It stores its values in the memory of the gradients, so the gradients are lost.
        """
        self.state.deviate()
        norm = float(self.reduction.global_norm())
        every = self.data.all_gather_numbers([norm])
        return math.sqrt(sum(distance * distance for (distance,) in every) / len(every))
