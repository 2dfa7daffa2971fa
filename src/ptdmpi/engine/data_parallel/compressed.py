"""Data parallelism with compressed gradients: each replica encodes its gradient and sends the
bytes, and all replicas update with the same mean of the decoded gradients.

All values have the scale of the global batch's gradient. Each of the n replicas compresses n times
its own part of that gradient, and the update uses the mean over the replicas.
"""

import math

import torch
from torch import Tensor

from ptdmpi.comm.queues import on_its_way
from ptdmpi.engine.data_parallel.feedback import Compression, kinds_of
from ptdmpi.engine.data_parallel.method import DataParallel, Replica


class Compressed(DataParallel):
    """The mean of compressed gradients; all replicas get the same bits.

    The input is gradients that are already summed over the tensor axis. The compression blocks of
    the logical model are therefore the same in every layout.
    """

    linear = False

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self.kinds = kinds_of(replica.config.data_parallel)
        self.compression = Compression(replica)
        # True from the change of the error-feedback state to the update of the weights
        self._midway = False

    def reduce(self) -> None:
        """Replace the gradients by the mean of the compressed gradients of all replicas.

        If any replica's gradient is not finite, or its square overflows, set all gradients to NaN
        instead: nothing is sent, the error-feedback state does not change, and every rank skips the
        step.
        """
        gradients = self.replica.buffer.gradients
        if self.replica.axes.world.greatest([self._overflows(gradients)])[0]:
            gradients.fill_(math.nan)
            return
        self._midway = True
        self.compression.mean(self.state, gradients.mul_(self.data.size))
        self.bits_per_element = self.compression.bits_per_element

    def after_update(self, step: int, skipped: bool) -> None:
        """Record that the weights and the error-feedback state belong to the same step again."""
        self._midway = False

    @property
    def settled(self) -> bool:
        """Return True if no change of the state is incomplete."""
        return not self._midway

    def replicas_lost(self) -> None:
        """Recompute the mean of all estimates (of EF21) over the remaining replicas."""
        kinds = self.state.kinds
        if "estimate_mean" in kinds:
            for mean, own in zip(
                kinds["estimate_mean"].parts, kinds["estimate"].parts, strict=True
            ):
                self.data.all_reduce(mean.copy_(own)).div_(self.data.size)

    def _overflows(self, gradients: Tensor) -> bool:
        most = math.sqrt(torch.finfo(gradients.dtype).max) / self.data.size
        if not gradients.numel():
            return False
        # the minimum and the maximum are NaN if any element is NaN, and computing them takes no
        # memory
        extremes = on_its_way(torch.stack(torch.aminmax(gradients)))
        # If a gradient overflows, its compressed form must not be sent. To know this, the host
        # waits for the device a second time in this step.
        self.replica.axes.settle()
        least, greatest = extremes.tolist()
        return not (greatest < most and least > -most)
