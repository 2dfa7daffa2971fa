"""Compressed gradients: each replica's is encoded, the bytes travel, and all replicas update with
the same mean of what arrives.

Everything is in units of the gradient of the global batch: replica i compresses n times its part of
it, and the mean over the n replicas is updated with.
"""

import math

import torch
from torch import Tensor

from ptdmpi.comm.queues import on_its_way
from ptdmpi.engine.data_parallel.feedback import Compression, kinds_of
from ptdmpi.engine.data_parallel.method import DataParallel, Replica


class Compressed(DataParallel):
    """The mean of compressed gradients, the same bits on all replicas.

    It sees gradients whose sums over the tensor axis are done, so that what is compressed, unit by
    unit of the logical model, is the same in every layout.
    """

    linear = False

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self.kinds = kinds_of(replica.config.data_parallel)
        self.compression = Compression(replica)
        self._midway = False  # memories have had a part of a step that has not updated yet

    def reduce(self) -> None:
        """Where any replica's gradient is not finite, or too large for its square to be, all of it
        is NaN instead: nothing is sent, no memory changes, and every rank skips the step."""
        gradients = self.replica.buffer.gradients
        if self.replica.axes.world.greatest([self._overflows(gradients)])[0]:
            gradients.fill_(math.nan)
            return
        self._midway = True
        self.compression.mean(self.state, gradients.mul_(self.data.size))
        self.bits_per_element = self.compression.bits_per_element

    def after_update(self, step: int, skipped: bool) -> None:
        self._midway = False

    @property
    def settled(self) -> bool:
        """True if nothing is under way."""
        return not self._midway

    def replicas_lost(self) -> None:
        """What EF21 takes for the mean of all estimates is that of those that are left."""
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
        # of NaN it is NaN; takes no memory
        extremes = on_its_way(torch.stack(torch.aminmax(gradients)))
        # nothing may be told of a gradient that overflows: a wait of the host besides the step's
        self.replica.axes.settle()
        least, greatest = extremes.tolist()
        return not (greatest < most and least > -most)
