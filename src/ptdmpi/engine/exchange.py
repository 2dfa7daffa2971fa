"""An exchange of tensors between all ranks of a group, by sends and receives."""

from collections.abc import Sequence

from torch import Tensor

from ptdmpi.comm.communicator import Communicator
from ptdmpi.comm.pairs import pair_order


def exchange(group: Communicator, leaving: Sequence[Tensor], arriving: Sequence[Tensor]) -> None:
    """Send the tensor `leaving[k]` to each other rank k of a group, and receive the tensor
    `arriving[k]` from rank k. All ranks of the group call this function together.

    Empty tensors are not sent. The entries `leaving[rank]` and `arriving[rank]` of this rank itself
    are not used.
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
