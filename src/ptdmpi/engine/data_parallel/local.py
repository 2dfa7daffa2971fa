"""Local steps, then an average: messages once in a round, not once in a step."""

import torch

from ptdmpi.engine.data_parallel.feedback import Compression, kinds_of
from ptdmpi.engine.data_parallel.method import DataParallel, Replica


class Local(DataParallel):
    """Local SGD, or FedAvg (McMahan et al. 2017, arXiv 1602.05629; Stich 2019, arXiv 1805.09767):
    each replica takes `local_steps` steps of the optimizer on its own samples, then all go on from
    the mean of their parameters, and of their moments where `average_moments` says so.

    With an outer step (DiLoCo: Douillard et al. 2023, arXiv 2311.08105, algorithm 1) what a round
    has moved the mean by is a gradient: `anchor` has the parameters that the round began with,
    and Nesterov's method of `outer_learning_rate` and `outer_momentum` moves them.

    With a compressor each replica sends a code of what the round has moved it by, and the mean of
    what arrives counts as that: FedPAQ (Reisizadeh et al. 2020, arXiv 1909.13014, algorithm 1), or,
    with `error_feedback` = "mem_sgd", Qsparse-local-SGD (Basu et al. 2019, arXiv 1906.02367,
    algorithm 1).

    Rounds are counted from step 0, whatever step a run resumes at. Equal bits for every t and p
    that have equal gradients: all here goes element by element, over replicas in ascending order.
    """

    differs = ("replicate",)

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self.settings = replica.config.data_parallel
        self.kinds = kinds_of(self.settings)
        compresses = self.settings.compressor != "none"
        self.compression = Compression(replica) if compresses else None

    def reduce(self) -> None:
        """The gradient of this replica's own mean loss, d times its share of the global batch's:
        the mean over replicas is then the gradient of the global batch, to the weight of a token.
        """
        self.replica.buffer.gradients.mul_(self.data.size)

    def after_update(self, step: int, skipped: bool) -> None:
        """At the end of a round all replicas are equal again, to the bit."""
        self.bits_per_element = None
        if (step + 1) % self.settings.local_steps:
            return
        averaged = [] if self.compression else ["weights"]
        if self.settings.average_moments:
            averaged += self.replica.config.optimizer.moments
        for kind in averaged:
            for part in self.state.kinds[kind].parts:
                self.data.all_reduce(part)
                part /= self.data.size
        if "anchor" in self.kinds:
            self._outer_step()

    def _outer_step(self) -> None:
        """As torch.optim.SGD with nesterov = True, on (where the round began) - (the mean). Takes
        the memory of the gradients."""
        rate = self.settings.outer_learning_rate
        momentum = self.settings.outer_momentum
        kinds = self.state.kinds
        buffer = self.replica.buffer
        # no place of the model is looked at alone: all of it is one part
        (master,) = buffer.masters
        (anchor,) = kinds["anchor"].parts
        moved = torch.sub(anchor, master, out=buffer.gradients[: len(master)])
        if self.compression:
            self.compression.mean(self.state, moved)
            self.bits_per_element = self.compression.bits_per_element
        if momentum:
            (velocity,) = kinds["outer_momentum"].parts
            velocity.mul_(momentum).add_(moved)
            moved.add_(velocity, alpha=momentum)
        anchor.sub_(moved, alpha=rate)
        master.copy_(anchor)
