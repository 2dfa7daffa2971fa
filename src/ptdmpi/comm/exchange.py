"""Tensors that each rank of a group sends to each other one, as sends and receives."""

from collections.abc import Sequence

from torch import Tensor

from ptdmpi.comm.communicator import Communicator
from ptdmpi.comm.pairs import pair_order


def exchange(group: Communicator, leaving: Sequence[Tensor], arriving: Sequence[Tensor]) -> None:
    """Send each rank of a group its tensor of `leaving`, and receive its tensor into `arriving`;
    all ranks call it.

    Empty tensors do not travel, and this rank's own are left alone.
    """
    others = [peer for peer in range(group.size) if peer != group.rank]
    sources = [peer for peer in others if arriving[peer].numel()]
    targets = [peer for peer in others if leaving[peer].numel()]
    handles = [
        group.isend(leaving[peer], peer) if sends else group.irecv(arriving[peer], peer)
        for sends, peer in pair_order(group.rank, group.size, sources, targets)
    ]
    for handle in handles:
        handle.wait()
