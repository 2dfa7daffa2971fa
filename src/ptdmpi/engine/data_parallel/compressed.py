"""Data parallelism with compressed gradients: each replica sends its gradient in compressed form,
and all replicas update their weights with the same mean of the decompressed gradients.

The gradient of the global batch is the sum of the contributions of the n replicas. Each replica
multiplies its own contribution by n and compresses the product. The update uses the mean of the
decompressed products, which approximates this sum.
"""

import math

import torch
from torch import Tensor

from ptdmpi.comm.queues import on_its_way
from ptdmpi.engine.data_parallel.feedback import Compression, kinds_of
from ptdmpi.engine.data_parallel.method import DataParallel, Replica


class Compressed(DataParallel):
    """A method whose update uses the mean of compressed gradients. The mean is bitwise equal on all
    replicas.

    Gradients are summed over the tensor axis before they are compressed. The result of the
    compression therefore does not depend on the size of the tensor axis.
    """

    linear = False

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self.kinds = kinds_of(replica.config.data_parallel)
        self.compression = Compression(replica)
        # True while the error-feedback state already belongs to this step, but the weights are not
        # updated yet
        self._midway = False

    def reduce(self) -> None:
        """Replace the gradients by the mean of the compressed gradients of all replicas.

        If the gradient of any replica is not finite, or its square overflows, set all gradients to
        NaN instead. In this case no compressed gradient is sent, the error-feedback state does not
        change, and every rank skips the step.
        """
        gradients = self.replica.buffer.gradients
        if self.replica.axes.world.greatest([self._overflows(gradients)])[0]:
            gradients.fill_(math.nan)
            return
        self._midway = True
        self.compression.mean(self.state, gradients.mul_(self.data.size))
        self.bits_per_element = self.compression.bits_per_element

    def after_update(self, step: int, skipped: bool) -> None:
        """Record that the weights are updated, so that the weights and the error-feedback state
        belong to the same step again."""
        self._midway = False

    @property
    def settled(self) -> bool:
        """Return True if weights and error-feedback state belong to the same step."""
        return not self._midway

    def replicas_lost(self) -> None:
        """After a loss of ranks, recompute the mean estimate over the remaining replicas. Only the
        error-feedback rule EF21 stores estimates (see `feedback.ef21`)."""
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
        # `torch.aminmax` returns NaN if any element is NaN, and needs no temporary tensor
        extremes = on_its_way(torch.stack(torch.aminmax(gradients)))
        # No compressed gradient may be sent if any gradient overflows. The host therefore waits
        # here for the two extremes, in addition to the wait for loss and norm later in the step.
        self.replica.axes.settle()
        least, greatest = extremes.tolist()
        return not (greatest < most and least > -most)
