"""The binary tree along which gradients are summed if `run.reproducible` is True. Its leaves are
the gradients of a step's microbatches (`ptdmpi.engine.data_parallel.reduce.TreeSum`)."""

from functools import cache


def nodes_of(leaves: int, first: int, end: int) -> int:
    """Return the smallest number of nodes of the binary tree over `leaves` leaves that together
    cover exactly the leaves `first` to `end` - 1. A node covers the leaves below it. If a node has
    no sibling, its parent has the same sum, so the two count as one node."""
    nodes = 0
    while first < end:
        span = 1
        while first % (2 * span) == 0 and min(first + 2 * span, leaves) <= end and span < leaves:
            span *= 2
        first, nodes = first + span, nodes + 1
    return nodes


@cache
def most_sums(microbatches: int, replicas: int) -> tuple[int, int]:
    """Return two numbers: the largest number of sums of gradients that a data rank stores during a
    backward, and the largest number later in the step.

    Each of the `replicas` data ranks computes the gradients of `microbatches` leaves. A node is
    complete on a data rank when the rank has computed the gradients of all leaves below the node.
    The rank stores one sum for each complete node whose parent is not complete. After the last
    backward, the rank also stores the sums of earlier ranks, and one sum in transit.
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
