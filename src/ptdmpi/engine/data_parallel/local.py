"""Local SGD: replicas do several local steps, and then average their weights. Replicas then
communicate once per round of local steps instead of once per step."""

import torch

from ptdmpi.engine.data_parallel.feedback import Compression, kinds_of
from ptdmpi.engine.data_parallel.method import DataParallel, Replica


class Local(DataParallel):
    """Local SGD, or FedAvg (McMahan et al. 2017, arXiv 1602.05629; Stich 2019, arXiv 1805.09767):
    each replica does `local_steps` steps of the optimizer on its own samples. After these local
    steps, all replicas continue from the mean of their parameters and, if `average_moments` is
    True, from the mean of their moments.

    An outer step (DiLoCo: Douillard et al. 2023, arXiv 2311.08105, algorithm 1) uses a difference
    as its gradient: the mean of the replicas' parameters at the beginning of a round minus the mean
    at the end of the round. `anchor` stores the parameters at the beginning of the round. These
    parameters are updated by Nesterov's method with `outer_learning_rate` and `outer_momentum`.

    With a compressor, each replica sends the change of its parameters in the round in compressed
    form. All replicas then change their parameters by the mean of the decompressed changes.
    Averaging compressed changes is FedPAQ (Reisizadeh et al. 2020, arXiv 1909.13014, algorithm 1).
    If `error_feedback` is "mem_sgd", the method is Qsparse-local-SGD (Basu et al. 2019, arXiv
    1906.02367, algorithm 1).

    Rounds are counted from step 0 of the run, even after a resume. Every operation of this method
    works element by element, and adds the values of the replicas in ascending order. If the
    gradients are bitwise equal for every tensor-parallel size and pipeline-parallel size, the
    weights are therefore bitwise equal, too.
    """

    differs = ("replicate",)

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self.settings = replica.config.data_parallel
        self.kinds = kinds_of(self.settings)
        self.compression: Compression | None = None
        if self.settings.compressor != "none":
            self.compression = Compression(replica)

    def reduce(self) -> None:
        """Multiply the gradients by the number of replicas. After this multiplication, the mean
        over the replicas is the gradient of the global batch, in which each token has the same
        weight."""
        self.replica.buffer.gradients.mul_(self.data.size)

    def after_update(self, step: int, skipped: bool) -> None:
        """Average over replicas at the end of a round. After the call, the averaged tensors are
        bitwise equal on all replicas."""
        self.bits_per_element = None
        if (step + 1) % self.settings.local_steps:
            return
        averaged = []
        if self.compression is None:
            averaged.append("weights")
        if self.settings.average_moments:
            averaged += self.replica.config.optimizer.moments
        for kind in averaged:
            for part in self.state.kinds[kind].parts:
                self.data.all_reduce(part)
                part /= self.data.size
        if "anchor" in self.kinds:
            self._outer_step()

    def _outer_step(self) -> None:
        """Do a step of torch.optim.SGD with nesterov = True. The gradient of this outer step is
        (the parameters at the beginning of the round) - (the mean of the parameters over replicas
        at the end of the round). With a compressor, the mean is computed from compressed
        differences. This gradient overwrites the buffer of gradients. All replicas continue from
        the parameters after the outer step."""
        rate = self.settings.outer_learning_rate
        momentum = self.settings.outer_momentum
        kinds = self.state.kinds
        buffer = self.replica.buffer
        # with local SGD nothing is sharded, so the whole flat buffer is one shard unit (a group of
        # parameters that is sharded together)
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
