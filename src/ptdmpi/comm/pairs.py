"""The order in which ranks exchange messages in pairs, so that none waits in a circle."""

from collections.abc import Sequence


def pair_order(
    rank: int, size: int, sources: Sequence[int], destinations: Sequence[int]
) -> list[tuple[bool, int]]:
    """Return (whether it sends, the other rank) for each message of `rank` in a group of `size`.

    The exchange cannot deadlock in this order, not even on a wire where each message waits for its
    other end before the next one begins (NCCL's). It is this rank's part of one total order of all
    messages of any graph: the first of the remaining messages always has both its ends free.
    Messages are sorted by how far apart the two ranks are around the group, then by whether that
    stretch is an even or an odd one. So in a ring, a grid or an exponential graph a message waits
    for few others, and not for a chain of them around the group.
    """

    def key(message: tuple[int, int]) -> tuple[int, int, int, bool]:
        """Place a message in the total order."""
        source, target = message
        ahead = (target - source) % size
        apart = min(ahead, size - ahead)
        start = min((a, b) for a, b in (message, message[::-1]) if (b - a) % size == apart)[0]
        return apart, start // apart % 2, start, source != start

    messages = [(peer, rank) for peer in sources] + [(rank, peer) for peer in destinations]
    order: list[tuple[bool, int]] = []
    for source, target in sorted(messages, key=key):
        sends = source == rank
        order.append((sends, target) if sends else (sends, source))
    return order
