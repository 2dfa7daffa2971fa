"""The balance of causal attention over context-parallel ranks, which divide sequences in zigzag
order.

For c ranks, a sequence is cut into 2c equal chunks, and rank r has the chunks r and 2c - 1 - r.
Without a sliding window, every rank has the same number of scores, which are products of a query
and a key (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2). With a window the numbers differ.
The queries in the first chunks see fewer keys than other queries, so the rank with the first chunk
has fewer scores than the other ranks.
"""

import itertools


def scores_before(position: float, window: float) -> float:
    """Return the number of scores of all queries before `position` if each query sees at most
    `window` keys, and only keys up to its own position."""
    inside = min(position, window)
    return inside**2 / 2 + window * (position - inside)


def imbalance(length: int, window: int, context: int) -> float:
    """Return the number of scores of the busiest of `context` ranks, divided by the mean over these
    ranks.

    The sequence has `length` positions, and a query sees at most `window` keys.
    """
    if window >= length or context == 1:
        return 1.0
    chunk = length / (2 * context)
    ends = [scores_before(number * chunk, window) for number in range(2 * context + 1)]
    chunks = [after - before for before, after in itertools.pairwise(ends)]
    busiest = max(first + second for first, second in zip(chunks, reversed(chunks), strict=True))
    return busiest * context / ends[-1]
