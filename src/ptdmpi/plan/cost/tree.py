"""The binary tree along which gradients are summed with `run.reproducible`. Its leaves are the
gradients of a step's microbatches (`ptdmpi.engine.data_parallel.reduce.TreeSum`)."""

from functools import cache


def nodes_of(leaves: int, first: int, end: int) -> int:
    """Return the smallest number of nodes of the binary tree over `leaves` leaves that together
    cover the leaves `first` to `end` - 1. If a node has no sibling, the node and its parent count
    as one."""
    nodes = 0
    while first < end:
        span = 1
        while first % (2 * span) == 0 and min(first + 2 * span, leaves) <= end and span < leaves:
            span *= 2
        first, nodes = first + span, nodes + 1
    return nodes


@cache
def most_sums(microbatches: int, replicas: int) -> tuple[int, int]:
    """Return the largest numbers of sums that a data rank stores: during a backward, and later in
    the step.

    Each of `replicas` data ranks has `microbatches` leaves. It stores a sum for each node that
    covers only finished leaves, and is not part of a larger such node. After the last backward, the
    sums of earlier ranks are added, and one sum is in transit.
    """
    leaves = microbatches * replicas
    firsts = range(0, leaves, microbatches)
    during = max(
        nodes_of(leaves, first, first + done) for first in firsts for done in range(microbatches)
    )
    if replicas == 1:
        return during, during + 1
    own = max(nodes_of(leaves, first, first + microbatches) for first in firsts)
    return during, max(during, own + max(nodes_of(leaves, 0, first) for first in firsts)) + 1
