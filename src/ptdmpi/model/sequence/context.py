"""The context axis. Its ranks have different positions of the same samples, and attention on each
rank sees the keys of all ranks.

This module implements the method "all_gather", which gathers keys and values (Dubey et al. 2024,
arXiv 2407.21783, section 3.3.2). `heads.py` implements the method "ulysses", and `ring.py` the
method "ring".
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ptdmpi.comm.communicator import Communicator, OneRank
from ptdmpi.config.choices import ContextMethod
from ptdmpi.model.sequence.positions import Positions


@dataclass(frozen=True)
class ContextAxis:
    """The communicator of the context axis, and the method by which attention sees all positions.
    Each rank of the axis has two chunks of every sequence, in zigzag order (see `Positions`)."""

    comm: Communicator = field(default_factory=OneRank)
    method: ContextMethod = "all_gather"

    @property
    def size(self) -> int:
        return self.comm.size

    @property
    def positions(self) -> Positions:
        """Return the positions of the sequence that this rank has."""
        return Positions(self.comm.rank, self.comm.size)

    @property
    def exchange(self) -> str:
        """Return the method by which attention sees all positions; "none" if each rank has all
        positions (see `Layout.exchange`)."""
        return self.method if self.size > 1 else "none"

    def whole_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values, [b, heads, s / c, head size] on each of the c ranks, to keys and
        values at all positions, [b, heads, s, head size]. In the backward, the gradients are summed
        over the c ranks."""
        keys, values = _WholeKeys.apply(k, v, self)
        return keys, values

    def in_order(self, dealt: Tensor) -> Tensor:
        """Return the tensor `dealt` [s, ...] in the order of positions. In `dealt`, the two chunks
        of each rank follow the chunks of the previous rank."""
        chunks = dealt.unflatten(0, (self.size, 2, -1))
        # in the order of ranks, the first chunks have ascending positions, and the second chunks
        # have descending positions
        return torch.cat((chunks[:, 0], chunks[:, 1].flip(0))).flatten(0, 1)

    def dealt(self, whole: Tensor) -> Tensor:
        """Return the tensor `whole` [s, ...], which is in the order of positions, in the order of
        the ranks that have its chunks. This is the inverse of `in_order`."""
        chunks = whole.unflatten(0, (2 * self.size, -1))
        return torch.stack((chunks[: self.size], chunks[self.size :].flip(0)), 1).flatten(0, 2)


class _WholeKeys(Function):
    """The gather of keys and values in one message. In the backward, their gradients are summed in
    one message."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, axis: ContextAxis) -> tuple[Tensor, Tensor]:
        ctx.axis = axis
        both = torch.stack((k, v)).permute(3, 0, 1, 2, 4).contiguous()  # [s / c, 2, b, heads, d]
        whole = axis.in_order(axis.comm.all_gather(both))
        keys, values = whole.permute(1, 2, 3, 0, 4)
        return keys, values

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, None]:
        axis: ContextAxis = ctx.axis
        both = axis.dealt(torch.stack((dk, dv)).permute(3, 0, 1, 2, 4))
        dk, dv = axis.comm.reduce_scatter(both.contiguous()).permute(1, 2, 3, 0, 4)
        return dk, dv, None
