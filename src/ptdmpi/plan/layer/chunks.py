"""Sizes of the chunks in which large tensors are computed to save memory. They change no result.

The loss widens logits to float32 in chunks of rows. On a CPU a chunk is 1 MiB, which fits into a
core's caches. On a device it is 64 MiB, so that kernels are few and long. The value for devices was
chosen by reasoning, not by measurement. Attention by products computes the scores of a block of
queries at once.
"""

HOST_ELEMENTS = 2**18
DEVICE_ELEMENTS = 2**24
QUERY_BLOCK = 128  # queries whose scores are computed at once,
BLOCK_SCORES = 1 << 20  # and the number of these scores


def loss_rows(columns: int, on_host: bool) -> int:
    """Return how many rows, each of `columns` logits, the loss converts to float32 at once; at
    least 1."""
    elements = HOST_ELEMENTS if on_host else DEVICE_ELEMENTS
    return max(1, elements // max(1, columns))


def scores_at_once(queries: int, keys: int, *, heads: int, group: int) -> int:
    """Return how many scores of a block of queries are computed at once. They are the scores of all
    `heads`, or of as many groups of heads as BLOCK_SCORES allows, but at least of one group."""
    block = min(QUERY_BLOCK, queries) * keys
    return min(heads * block, max(BLOCK_SCORES, group * block))
