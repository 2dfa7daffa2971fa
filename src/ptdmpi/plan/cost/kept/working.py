"""What a backward pass needs beside what a layer keeps: looked at where it can be most."""

from dataclasses import dataclass

from ptdmpi.plan.cost.kept.activations import Sizes, kept, layer_activations, total_bytes

QUERY_BLOCK = 128  # queries whose capped scores are computed at once,
BLOCK_SCORES = 1 << 20  # and so many of the scores
MASK_CHUNK_ELEMENTS = 2**18  # of a dropout mask, drawn at once (on a CPU)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer under a mode: what it keeps of a microbatch, and the most that its
    backward pass needs beside what all layers in front of it keep: in its MLP and in the attention
    core, or, recomputing, for a mask."""

    kept: int
    works: int
    mlp: int
    core: int


def layer_bytes(sizes: Sizes, mode: str) -> LayerBytes:
    """Looked at where it can be most: behind the MLP and in the attention core. What is recomputed
    comes on top there, what has been used by then is gone."""
    items = layer_activations(sizes, mode)
    whole = total_bytes(kept(items, mode))
    stays, dropped = whole, total_bytes(items) - whole
    if sizes.layout.partition_activations and sizes.layout.tensor > 1 and mode == "full":
        # the share stays, and what is gathered of it is there like all that is recomputed
        stays, dropped = whole // sizes.layout.tensor, dropped + whole
    mlp = total_bytes([item for item in items if item.name.startswith("mlp")])
    early = dropped if mode == "full" else 0
    mlp_works = early + _mlp_backward(sizes)
    works = max(mlp_works, dropped - mlp + _core_backward(sizes, draws=True))
    if mode == "full":
        works = max(works, early + _drawing_a_mask(sizes))
    core = dropped - mlp + _core_backward(sizes, draws=mode != "none")
    return LayerBytes(stays, works, mlp_works, core)


def _mlp_backward(sizes: Sizes) -> int:
    """At the second linear, the activation function and the first linear, whatever is most; the
    gradient of the output is held throughout."""
    model, c = sizes.model, sizes.compute_bytes
    held = sizes.local_tokens * model.hidden * c
    if sizes.local_tokens < sizes.tokens:
        held += sizes.tokens * model.hidden * c  # gathered
    ffn = sizes.share(model.ffn_hidden)
    up = model.gates * ffn
    down_linear = linear_backward(sizes, ffn, model.hidden, "mlp.down")
    # what is behind them is gone: first the second linear's input, then the activation's too
    activation = sizes.tokens * c * (up + ffn * (model.gates == 2))
    up_linear = linear_backward(sizes, model.hidden, up, "mlp.up") - sizes.tokens * ffn * c
    return held + max(down_linear, activation, up_linear)


def _hash_bytes(elements: int) -> int:
    """What drawing a dropout mask needs: int64, three at a time."""
    return 3 * 8 * min(elements, MASK_CHUNK_ELEMENTS)


def _drawing_a_mask(sizes: Sizes) -> int:
    """The last act of a layer's recomputation: hashes beside what they drop from and the gradient
    that waits."""
    if not sizes.drops:
        return 0
    local = sizes.local_tokens * sizes.model.hidden
    return _hash_bytes(local) + 2 * local * sizes.compute_bytes


def linear_backward(
    sizes: Sizes, inputs: int, outputs: int, name: str, rows: int | None = None
) -> int:
    """The gradient of the input, of so many rows; None: all positions. Half types also need the
    gradient of the weight and its float32 form, which is added, or, where they are widened, copies
    of operands and result instead. A column-parallel linear, all but "mlp.down", has the input's
    gradient first, a row-parallel one the weight's. Of a frozen one what comes through its adapters
    is added to the input's gradient instead."""
    c, wide = sizes.compute_bytes, sizes.wide_bytes
    rows = sizes.tokens if rows is None else rows
    result, copies = rows * inputs * c, rows * (inputs + outputs) + inputs * outputs
    widens = sizes.operand_bytes > c
    if sizes.model.adapt.adapts:
        # of one adapter after the other; with dropout also its mask and what is masked
        drawn = _hash_bytes(rows * inputs) + rows * inputs * (1 + c)
        drawn *= sizes.model.adapt.dropout > 0.0
        beside = (result + drawn) * bool(sizes.multiplied(name))
        return result + max(beside, copies * sizes.operand_bytes * widens)
    if widens:
        return copies * sizes.operand_bytes
    # a float32 form of it only where gradients are summed in float32
    widened = wide if sizes.software.gradient_bytes >= wide else 0
    weight = inputs * outputs * (c + widened) if wide > c else 0
    return max(result, weight) if name == "mlp.down" else result + weight


def _core_backward(sizes: Sizes, draws: bool) -> int:
    """Gradients of the softmax's output and input, or, in recomputation, which `draws` its mask
    again, the hashes of that beside scores and weights; FlashAttention has the gradients of its
    operands."""
    model, c = sizes.model, sizes.compute_bytes
    rows = sizes.tokens * sizes.share(model.heads)
    held = sizes.local_tokens * model.hidden * c
    if model.attention_dropout > 0.0:
        scores = rows * model.seq_length
        drawing = (_hash_bytes(scores) + 2 * scores * c) * draws
        return held + max(scores * 2 * sizes.wide_bytes, drawing)
    return held + 4 * rows * model.head_size * sizes.operand_bytes + _capped_block(sizes)


def _capped_block(sizes: Sizes) -> int:
    """Bytes of attention with capped scores, one block of queries on all keys: scores, tangents,
    their gradients and a factor of these, and the weights as they are multiplied."""
    model = sizes.model
    if not model.attention_softcap:
        return 0
    heads = sizes.share(model.heads) * sizes.layout.micro_size
    scores = heads * min(QUERY_BLOCK, model.seq_length) * model.seq_length
    # of that as many key heads as keep to the limit, or one
    group = model.heads // model.kv_heads
    scores = min(scores, max(BLOCK_SCORES, scores // heads * group * sizes.layout.micro_size))
    return scores * (4 * sizes.wide_bytes + sizes.operand_bytes)
