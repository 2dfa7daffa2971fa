"""An order of messages between pairs of ranks in which no deadlock is possible."""

from collections.abc import Sequence


def pair_order(
    rank: int, size: int, sources: Sequence[int], destinations: Sequence[int]
) -> list[tuple[bool, int]]:
    """Return the messages of `rank` in a group of `size` ranks, in the order in which `rank` must
    begin them. Each message is (True for a send or False for a receive, other rank).

    An exchange in this order cannot deadlock, even if the transport begins a message only after the
    previous message of the same rank is complete (as NCCL does). The reason is that all ranks
    follow one total order of all messages in the group. Take the first message in this order that
    is not yet sent: its two ranks have no earlier message to send or receive, so it can always be
    sent.

    Think of the ranks of the group as a ring. Messages are sorted by the distance `apart` between
    their two ranks around this ring. `start` is the rank from which `apart` steps upwards around
    the ring lead to the other rank. Among messages of the same distance, those with an even
    `start // apart` come first. In this order, a message in a ring, a grid or an exponential graph
    waits for few other messages, and not for a chain of messages around the ring.
    """

    def key(message: tuple[int, int]) -> tuple[int, int, int, bool]:
        """Return the sort key of a message in the total order."""
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
