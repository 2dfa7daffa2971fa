"""Attention in blocks of queries: the number of queries in a block, and the memory of a block."""

from ptdmpi.plan.layer.attention.shape import core_shape
from ptdmpi.plan.layer.chunks import QUERY_BLOCK, WHOLE_RUN, scores_at_once
from ptdmpi.plan.layer.sizes import Sizes


def in_blocks(sizes: Sizes) -> bool:
    """Return True if the model runs on a CPU, and the CPU computes attention in blocks of queries,
    with one kernel for each block."""
    model = sizes.model
    is_cut = core_shape(sizes).queries < model.seq_length or model.sliding_window > 0
    is_long = model.attention == "causal" and model.seq_length > QUERY_BLOCK
    return sizes.on_host and sizes.fused_attention and (is_cut or is_long)


def queries_at_once(sizes: Sizes) -> int:
    """Return the number of queries of a head for which one kernel call computes gradients."""
    queries = core_shape(sizes).queries
    if not in_blocks(sizes):
        return queries
    if sizes.model.sliding_window:
        return min(QUERY_BLOCK, queries)
    if queries < sizes.model.seq_length:
        # With context parallelism, a rank has two chunks of the sequence. One call of the kernel
        # has the queries of one chunk, and all keys up to the end of this chunk.
        return queries // 2
    return queries if queries >= WHOLE_RUN else min(QUERY_BLOCK, queries)


def kept_probabilities(sizes: Sizes) -> int:
    """Return the number of attention probabilities per head that the forward of a microbatch keeps
    for the backward.

    The probabilities are kept in blocks of queries. A block has all keys up to the position of its
    last query, including keys that are outside the window or in other documents.
    """
    model, block = sizes.model, sizes.software.kept_block
    if model.attention != "causal" or model.attention_softcap or _is_whole(sizes):
        return 0
    count = 0
    # With context parallelism on c ranks, a sequence is cut into 2c chunks, and the first rank has
    # the first and the last chunk. All ranks have the same number of probabilities, so those of the
    # first rank are counted.
    runs = [range(model.seq_length)]
    if core_shape(sizes).queries < model.seq_length:
        chunk = model.seq_length // (2 * sizes.layout.context)
        runs = [range(chunk), range(model.seq_length - chunk, model.seq_length)]
    for run in runs:
        for first in range(run.start, run.stop, block):
            end = min(first + block, run.stop)
            count += end * (end - first)
    return count * sizes.layout.micro_size


def product_bytes(sizes: Sizes, backward: bool) -> int:
    """Return the working bytes of attention by matrix products over blocks of queries, in its
    forward, or in its backward if `backward` is True. The result is 0 if a fused kernel computes
    the attention.

    The forward has copies of queries and keys in float32 or float64, and a copy of values. In
    addition to these copies, the backward has copies of queries, keys and output gradients in their
    own type, and the gradients of queries, keys, values and outputs. The gradients of keys and
    values are in float32 or float64. For one block of queries, the memory also holds the scores (in
    float32 or float64) and the probabilities (in the type of queries and keys). In a backward, it
    also holds the gradients of scores and probabilities, in the type of matrix products.
    """
    block = _product_block(sizes, backward)
    if not block:
        return 0
    model, shape = sizes.model, core_shape(sizes)
    c, wide, operand = sizes.compute_bytes, sizes.wide_bytes, sizes.operand_bytes
    batch, d, v = sizes.layout.micro_size, model.head_size, model.value_size
    rows, keys = shape.heads * shape.queries * batch, shape.kv_heads * sizes.keys
    group = model.heads // model.kv_heads
    scores = scores_at_once(
        shape.queries,
        model.seq_length,
        heads=shape.heads * batch,
        group=group * batch,
        most=block,
    )
    # For each score, the memory holds its value and its exponential. With a soft cap, it also holds
    # the score's tanh, and if probabilities have a narrower type, a copy of the probability in this
    # type.
    capped = wide if model.attention_softcap else 0
    softmax = capped + 2 * wide + (c if c < wide else 0)
    copies = (rows + keys) * d * wide + keys * v * c
    if not backward:
        return copies + max(scores * softmax, rows * d * wide)
    copies += (rows * (2 * d + 2 * v) + keys * d) * c + keys * (d + v) * wide
    # One block's contribution to the gradients of keys or values is in memory until it is added to
    # these gradients.
    added = scores // (group * min(block, shape.queries)) * max(d, v) * wide
    # For each score, the backward holds the probability, a copy of the probability in the type of
    # the products, and the gradients of both. With a soft cap, it also holds the score's tanh.
    derivative = capped + c + 2 * operand + (operand if c < operand else 0)
    return copies + scores * max(softmax, derivative) + added


def _product_block(sizes: Sizes, backward: bool) -> int:
    """Return the number of queries in a block if matrix products compute the attention, otherwise
    0. Attention with a soft cap is always computed by matrix products. Without a causal mask, a
    block has all queries of the rank."""
    model, software = sizes.model, sizes.software
    if model.attention_dropout > 0.0 or not sizes.fused_attention:
        return 0
    chosen = software.backward_block if backward else software.forward_block
    is_long = model.attention == "causal" and model.seq_length > QUERY_BLOCK
    if not (sizes.on_host and is_long) or _is_whole(sizes):
        chosen = 0
    if not model.attention_softcap:
        return chosen
    if model.attention != "causal":
        return core_shape(sizes).queries
    return chosen or QUERY_BLOCK


def _is_whole(sizes: Sizes) -> bool:
    """Return True if sequences are so long that the library's kernel computes their attention,
    although matrix products compute the attention of shorter sequences."""
    whole_from = sizes.software.whole_from
    model = sizes.model
    return 0 < whole_from <= model.seq_length and not model.sliding_window
