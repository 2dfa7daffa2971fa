"""An order of messages between pairs of ranks in which no deadlock is possible."""

from collections.abc import Sequence


def pair_order(
    rank: int, size: int, sources: Sequence[int], destinations: Sequence[int]
) -> list[tuple[bool, int]]:
    """Return (True for a send or False for a receive, other rank) for each message of `rank` in a
    group of `size` ranks.

    An exchange in this order cannot deadlock, even if the transport begins a message only after the
    previous message of the same rank is complete (as NCCL does). The reason is that all messages in
    the group have one total order, which every rank follows. The two ranks of the first message
    that is not yet sent have no earlier message to send or receive, so this message can always be
    sent. Messages are sorted by the distance of the two ranks around the group. In a message of a
    certain distance, one of the two ranks is called `start`: the rank from which `distance` steps
    upwards around the group lead to the other rank. Among messages of the same distance, those with
    an even start // distance come before those with an odd start // distance. With this order, a
    message in a ring, a grid or an exponential graph waits for few other messages, and not for a
    chain of messages around the group.
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
