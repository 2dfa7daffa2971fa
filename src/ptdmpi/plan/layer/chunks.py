"""Sizes of the chunks in which large tensors are computed to save memory. The sizes do not affect
the results.

The loss converts logits to float32 in chunks of rows. On a CPU, a chunk is 1 MiB by default, which
fits into the caches of a core; a run may measure which size is the fastest. On a GPU, a chunk is 64
MiB, so that there are few kernels, each with much work; this size was not chosen by measurement. If
attention is computed by matrix products, the scores of one block of queries are computed at a time.
"""

HOST_ELEMENTS = 2**18
DEVICE_ELEMENTS = 2**24
# Smallest number of rows in each partial sum of the gradients of a norm's weights in a Triton
# kernel.
NORM_ROWS = 16
NORM_PROGRAMS = 256  # Largest number of such partial sums.
QUERY_BLOCK = 128  # Number of queries in a block. The scores of a block are computed at once.
BLOCK_SCORES = 1 << 20  # Largest number of scores that are computed at once.
# For the backward of causal attention on a CPU, PyTorch's kernel gets consecutive queries and the
# keys at the same positions. If there are at least WHOLE_RUN such queries, one call computes them
# all. Otherwise they are divided into blocks of QUERY_BLOCK queries, with one call for each block.
# From 768 queries on, the kernel itself works on 256 queries at a time instead of 64. The following
# times are milliseconds on one thread of a Xeon with AMX, for 8 heads of size 64, as (calls for
# blocks of 128 queries, one call):
#     positions   float32         bfloat16
#     512         8.3, 9.2        12.3, 7.8
#     768         16.9, 14.2      26.2, 11.1
#     4096        540, 305        629, 233
WHOLE_RUN = 768


def loss_rows(columns: int, logits: int) -> int:
    """Return the number of rows that the loss converts to float32 at once; at least 1. Each row has
    `columns` logits, and a chunk has at most `logits` logits, unless a single row has more."""
    return max(1, logits // max(1, columns))


def norm_programs(rows: int) -> int:
    """Return the number of partial sums that the Triton kernel of a norm's backward computes for
    the gradients of the weights. Each partial sum is over some of the `rows` rows. The number of
    partial sums does not depend on the device's number of processors, so that the gradients have
    the same bits on every device."""
    return max(1, min(NORM_PROGRAMS, -(-rows // NORM_ROWS)))


def scores_at_once(
    queries: int, keys: int, *, heads: int, group: int, most: int = QUERY_BLOCK
) -> int:
    """Return the number of attention scores that are computed at once. The `queries` queries are
    divided into blocks of at most `most` queries, and each query of a block has `keys` keys. If a
    block has at most BLOCK_SCORES scores over all `heads` heads, all heads are computed at once.
    Otherwise, as many heads as BLOCK_SCORES allows are computed at once, but at least the `group`
    query heads that share a key head."""
    block = min(most, queries) * keys
    return min(heads * block, max(BLOCK_SCORES, group * block))
