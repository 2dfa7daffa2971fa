"""Sizes of the chunks in which large tensors are computed to save memory. The sizes change no
result.

The loss converts logits to float32 in chunks of rows. On a CPU a chunk is 1 MiB, which fits into a
core's caches. On a device a chunk is 64 MiB, so that there are few kernels, each with much work.
The size of a chunk on devices was chosen by reasoning, not by measurement. Attention by matrix
products computes the scores of one block of queries at a time.
"""

HOST_ELEMENTS = 2**18
DEVICE_ELEMENTS = 2**24
# Least number of rows whose gradients of a norm's weights a Triton kernel sums at once.
NORM_ROWS = 16
NORM_PROGRAMS = 256  # Largest number of such sums.
QUERY_BLOCK = 128  # Number of queries whose scores are computed at once.
BLOCK_SCORES = 1 << 20  # Largest number of scores that are computed at once.
# The number of queries whose gradients are computed at once on a CPU, in a block of the backward
# pass in which every query sees all keys of the block.
EARLIER_BLOCK = 512


def loss_rows(columns: int, on_host: bool) -> int:
    """Return the number of rows of `columns` logits that the loss converts to float32 at once; at
    least 1."""
    elements = HOST_ELEMENTS if on_host else DEVICE_ELEMENTS
    return max(1, elements // max(1, columns))


def norm_programs(rows: int) -> int:
    """Return the number of sums into which the Triton kernel of a norm's backward divides the
    gradients of the weights: each is the sum over some of the `rows`. The number does not depend on
    the device, so that the bits of the gradients do not depend on its number of processors."""
    return max(1, min(NORM_PROGRAMS, -(-rows // NORM_ROWS)))


def scores_at_once(queries: int, keys: int, *, heads: int, group: int) -> int:
    """Return the number of scores of a block of queries that are computed at once. If all `heads`
    have at most BLOCK_SCORES scores, these are the scores of all heads. Otherwise they are the
    scores of as many heads as BLOCK_SCORES allows, but at least of one group of `group` heads."""
    block = min(QUERY_BLOCK, queries) * keys
    return min(heads * block, max(BLOCK_SCORES, group * block))
