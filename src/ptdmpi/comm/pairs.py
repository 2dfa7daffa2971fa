"""An exchange between neighbours as sends and receives, in an order that cannot deadlock."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:  # which imports this module
    from ptdmpi.comm.communicator import Communicator


def pair_order(
    rank: int, size: int, sources: Sequence[int], destinations: Sequence[int]
) -> list[tuple[bool, int]]:
    """(whether it sends, the other rank) for each message of `rank` in a group of `size`, in an
    order in which no exchange can deadlock, on a wire too where each message waits for its other
    end before the next one begins (NCCL's).

    It is this rank's part of one total order of all messages of any graph: of those that are left
    the first one always has both its ends free. Sorted by how far apart the two ranks are around
    the group, then by whether that stretch is an even or an odd one: so in a ring, a grid or an
    exponential graph a message waits for few others, and not for a chain of them around the group.
    """

    def key(message: tuple[int, int]) -> tuple[int, int, int, bool]:
        source, target = message
        ahead = (target - source) % size
        apart = min(ahead, size - ahead)
        start = min((a, b) for a, b in (message, message[::-1]) if (b - a) % size == apart)[0]
        return apart, start // apart % 2, start, source != start

    messages = [(peer, rank) for peer in sources] + [(rank, peer) for peer in destinations]
    ordered = sorted(messages, key=key)
    return [(source == rank, target if source == rank else source) for source, target in ordered]


def exchange(group: "Communicator", leaving: Sequence[Tensor], arriving: Sequence[Tensor]) -> None:
    """Send each rank of a group its tensor of `leaving`, and fill that of `arriving` with what it
    sends here; all of them call it. Empty ones do not travel, nor does what is this rank's own."""
    others = [peer for peer in range(group.size) if peer != group.rank]
    sources, targets = ([o for o in others if some[o].numel()] for some in (arriving, leaving))
    handles = [
        group.isend(leaving[peer], peer) if sends else group.irecv(arriving[peer], peer)
        for sends, peer in pair_order(group.rank, group.size, sources, targets)
    ]
    for handle in handles:
        handle.wait()
