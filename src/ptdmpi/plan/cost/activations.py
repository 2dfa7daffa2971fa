"""What a rank keeps of activations: an inventory of tensors, item by item.

The tables list what the backward pass of one microbatch needs: as autograd keeps it for the code in
`ptdmpi.model`, or, for programs whose attention writes its scores to memory, the layer of
Korthikanti et al. 2022 (arXiv 2205.05198). Tensors that share their storage are one item.
docs/memory.md explains where the two differ.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ptdmpi.config import Layout, ModelConfig
from ptdmpi.config.legality import RECOMPUTE_MODES
from ptdmpi.plan.machine.cluster import TRAINER, Software

WIDE_BYTES = 4
COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
QUERY_BLOCK = 128  # queries whose capped scores are computed at once,
BLOCK_SCORES = 1 << 20  # and so many of the scores
MASK_CHUNK_ELEMENTS = 2**18  # of a dropout mask, drawn at once (on a CPU)


@dataclass(frozen=True)
class Item:
    """`elements` of `element_bytes` each; `kept_up_to` is the last mode of recomputation
    (none, selective, full) that keeps it."""

    name: str
    elements: int
    element_bytes: int
    kept_up_to: str = "selective"

    @property
    def bytes(self) -> int:
        return self.elements * self.element_bytes


def kept(items: Sequence[Item], mode: str) -> list[Item]:
    """Those of `items` that recomputation `mode` keeps until the backward pass."""
    rank = RECOMPUTE_MODES.index
    return [item for item in items if rank(mode) <= rank(item.kept_up_to)]


def total_bytes(items: Sequence[Item]) -> int:
    return sum(item.bytes for item in items)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model on one rank of a layout, for one microbatch, in a compute type
    ("bf16", "fp16", "fp32" or "fp64"), as a program runs it."""

    model: ModelConfig
    layout: Layout
    precision: str
    software: Software = TRAINER

    @property
    def tokens(self) -> int:
        """s b."""
        return self.model.seq_length * self.layout.micro_size

    @property
    def local_tokens(self) -> int:
        """Positions of this rank between the blocks: s b, or s b / t under sequence parallelism."""
        return self.tokens // (self.layout.tensor if self.layout.sequence_parallel else 1)

    @property
    def predicted(self) -> int:
        """Positions of a microbatch whose tokens are asked for: s b, or the masked ones."""
        return self.model.predictions() * self.layout.micro_size

    @property
    def compute_bytes(self) -> int:
        return COMPUTE_BYTES[self.precision]

    @property
    def wide_bytes(self) -> int:
        """Bytes of a number in softmaxes, losses and master weights: float32 at least."""
        return max(WIDE_BYTES, self.compute_bytes)

    @property
    def operand_bytes(self) -> int:
        """Bytes of a number in the operands of a product."""
        return self.wide_bytes if self.software.wide_products else self.compute_bytes

    @property
    def boundary_bytes(self) -> int:
        """An activation between two layers, or its gradient, on this rank."""
        return self.local_tokens * self.model.hidden * self.compute_bytes

    @property
    def drops(self) -> bool:
        """Whether anything is dropped between the blocks."""
        return self.software.dropout or self.model.dropout > 0.0

    def share(self, size: int) -> int:
        """A tensor rank's part of `size`, padded where t does not divide it."""
        return -(-size // self.layout.tensor)


def korthikanti_layer(
    s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False
) -> list[Item]:
    """The layer of Korthikanti et al. 2022, section 4.1 and Table 2: fp16, dropout, nothing fused.

    s b h (10 + 24/t + 5 a s/(h t)) bytes; s b h (34/t + 5 a s/(h t)) under sequence parallelism.
    """
    tokens = s * b
    whole = tokens // t if sequence_parallel else tokens
    hidden, scores = tokens * h // t, b * a * s * s // t
    return [
        Item("attention_norm.input", whole * h, 2, "full"),
        Item("attention.qkv.input", whole * h, 2),
        Item("attention.query_key", 2 * hidden, 2),
        Item("attention.softmax", scores, 2, "none"),
        Item("attention.softmax.mask", scores, 1, "none"),
        Item("attention.softmax.dropped", scores, 2, "none"),
        Item("attention.value", hidden, 2),
        Item("attention.out.input", hidden, 2),
        Item("attention.mask", whole * h, 1),
        Item("mlp_norm.input", whole * h, 2),
        Item("mlp.up.input", whole * h, 2),
        Item("mlp.activation.input", 4 * hidden, 2),
        Item("mlp.down.input", 4 * hidden, 2),
        Item("mlp.mask", whole * h, 1),
    ]


def layer_activations(sizes: Sizes, mode: str) -> list[Item]:
    """All items of one layer, as the program runs it; `mode` as for `our_layer`."""
    model, layout = sizes.model, sizes.layout
    if sizes.software.attention == "flash":
        return our_layer(sizes, mode)
    return korthikanti_layer(
        model.seq_length,
        layout.micro_size,
        model.hidden,
        model.heads,
        layout.tensor,
        layout.sequence_parallel,
    )


def our_layer(sizes: Sizes, mode: str) -> list[Item]:
    """All items of one layer of this code; under `mode` some of them are recomputed (see `kept`).

    The layer runs alike in every mode, but for what the attention core's products work on: where
    that is a copy of query, key and value, these stay for the core's recomputation only.
    """
    model, c = sizes.model, sizes.compute_bytes
    local = sizes.local_tokens * model.hidden
    ffn = sizes.tokens * sizes.share(model.ffn_hidden)
    mask = [local] if sizes.drops else []
    # the input of the layer is all that full recomputation keeps
    first = ("selective", "full") if model.block_norm == "post" else ("full", "selective")
    return [
        *_norm(sizes, "attention_norm", first[0]),
        Item("attention.qkv.input", local, c, first[1]),
        *(_query_key_norms(sizes) if model.qk_norm else ()),
        *_attention_core(sizes, mode),
        Item("attention.out.input", sizes.tokens * sizes.share(model.attention_width), c),
        *(_norm(sizes, "attention_post_norm") if model.block_norm == "sandwich" else ()),
        *(Item("attention.mask", size, 1) for size in mask),
        *_norm(sizes, "mlp_norm"),
        Item("mlp.up.input", local, c),
        Item("mlp.activation.input", model.gates * ffn, c),
        Item("mlp.down.input", ffn, c),
        *(_norm(sizes, "mlp_post_norm") if model.block_norm == "sandwich" else ()),
        *(Item("mlp.mask", size, 1) for size in mask),
    ]


def _norm(
    sizes: Sizes, name: str, kept_up_to: str = "selective", rows: int | None = None
) -> Iterator[Item]:
    """A norm of `rows` positions; None: of those that this rank has between the blocks."""
    model, rows = sizes.model, sizes.local_tokens if rows is None else rows
    yield Item(f"{name}.input", rows * model.hidden, sizes.compute_bytes, kept_up_to)
    if model.norm == "layernorm":
        yield Item(f"{name}.statistics", 2 * rows, sizes.compute_bytes)  # mean, 1 / deviation
    else:
        yield Item(f"{name}.statistics", rows, sizes.wide_bytes)  # 1 / root mean square


def _query_key_norms(sizes: Sizes) -> Iterator[Item]:
    """Their input is all that the first linear gave: queries and keys are views of it."""
    model, c = sizes.model, sizes.compute_bytes
    heads, kv_heads = sizes.share(model.heads), sizes.share(model.kv_heads)
    size = sizes.tokens * (heads + 2 * kv_heads) * model.head_size
    yield Item("attention.query_key_norms.input", size, c)
    rows, layernorm = sizes.tokens * (heads + kv_heads), model.norm == "layernorm"
    yield Item(
        "attention.query_key_norms.statistics",
        rows * (2 if layernorm else 1),
        c if layernorm else sizes.wide_bytes,
    )


def _attention_core(sizes: Sizes, mode: str) -> Iterator[Item]:
    """From query, key and value to the heads' outputs, which are the next linear's input."""
    model, c = sizes.model, sizes.compute_bytes
    heads, kv_heads = sizes.share(model.heads), sizes.share(model.kv_heads)
    rows = sizes.tokens * heads
    explicit = model.attention_dropout > 0.0
    # the explicit core repeats grouped keys and values, FlashAttention does not
    multiplied = 3 * heads if explicit else heads + 2 * kv_heads
    copied = sizes.operand_bytes != c or multiplied != heads + 2 * kv_heads
    per_head = sizes.tokens * model.head_size
    if mode == "selective" or not copied:
        yield Item("attention.query_key_value", (heads + 2 * kv_heads) * per_head, c)
    if copied:
        size = multiplied * per_head
        yield Item("attention.query_key_value.copy", size, sizes.operand_bytes, "none")
    if explicit:
        scores = rows * model.seq_length
        if model.attention == "causal":
            yield Item("attention.future", model.seq_length**2, 1, "none")
        if model.attention_softcap:
            yield Item("attention.tangents", scores, c, "none")
        yield Item("attention.softmax", scores, sizes.wide_bytes, "none")
        yield Item("attention.softmax.mask", scores, 1, "none")
        yield Item("attention.softmax.dropped", scores, sizes.operand_bytes, "none")
    else:
        yield Item("attention.logsumexp", rows, sizes.wide_bytes, "none")
        if sizes.operand_bytes != c:
            yield Item("attention.output.copy", rows * model.head_size, sizes.wide_bytes, "none")


def embedding_activations(sizes: Sizes) -> list[Item]:
    items = []
    if sizes.layout.tensor > 1:
        items.append(Item("embedding.ids", sizes.tokens, 8))
        items.append(Item("embedding.elsewhere", sizes.tokens, 1))
    if sizes.model.embedding_norm:
        items += _norm(sizes, "embedding.norm")
    if sizes.drops:
        items.append(Item("embedding.mask", sizes.local_tokens * sizes.model.hidden, 1))
    return items


def head_activations(sizes: Sizes, vocab_size: int) -> list[Item]:
    """Final norm, output head and cross-entropy."""
    model, c = sizes.model, sizes.compute_bytes
    local = sizes.local_tokens * model.hidden
    logits = sizes.predicted * sizes.share(vocab_size)
    return [
        *(_norm(sizes, "final_norm") if model.block_norm != "post" else ()),
        *(_masked_head(sizes) if model.masked else [Item("head.input", local, c)]),
        *([Item("head.tangents", logits, c)] if model.logit_softcap else ()),
        Item("loss.probabilities", logits, sizes.wide_bytes),
        Item("loss.labels", sizes.predicted, 8),
        Item("loss.here", sizes.predicted, 1),
    ]


def _masked_head(sizes: Sizes) -> Iterator[Item]:
    """What is kept of the masked positions, and of the first one of each sample."""
    model, c = sizes.model, sizes.compute_bytes
    b, hidden = sizes.layout.micro_size, sizes.predicted * model.hidden
    yield Item("head.positions", sizes.predicted + b, 8)
    yield Item("head.selected", hidden + b * model.hidden, c)
    if model.output_head == "mlm":
        yield Item("mlm.activation.input", hidden, c)
        yield from _norm(sizes, "mlm.norm", rows=sizes.predicted)
        yield Item("head.input", hidden, c)
    if model.sentence_order:
        yield Item("sentence.order.input", b * model.hidden, c)


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


def loss_working_bytes(sizes: Sizes, vocab_size: int) -> int:
    """What the loss needs beside what the head keeps. Its gradient takes the place of the
    probabilities; for a half type it is converted beside them, and the head's products may widen it
    once more."""
    half = sizes.compute_bytes < sizes.wide_bytes
    logits = sizes.predicted * sizes.share(vocab_size)
    uncapped = sizes.compute_bytes if sizes.model.logit_softcap else 0
    return logits * ((sizes.wide_bytes + sizes.compute_bytes) * half + uncapped)


def _mlp_backward(sizes: Sizes) -> int:
    """At the second linear, the activation function and the first linear, whatever is most; the
    gradient of the output is held throughout."""
    model, c = sizes.model, sizes.compute_bytes
    held = sizes.local_tokens * model.hidden * c
    if sizes.local_tokens < sizes.tokens:
        held += sizes.tokens * model.hidden * c  # gathered
    ffn = sizes.share(model.ffn_hidden)
    up = model.gates * ffn
    down_linear = _linear_backward(sizes, ffn, model.hidden, column=False)
    # what is behind them is gone: first the second linear's input, then the activation's too
    activation = sizes.tokens * c * (up + ffn * (model.gates == 2))
    up_linear = _linear_backward(sizes, model.hidden, up, column=True) - sizes.tokens * ffn * c
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


def _linear_backward(sizes: Sizes, inputs: int, outputs: int, column: bool) -> int:
    """The gradient of the input. Half types also need the gradient of the weight and its float32
    form, which is added, or, where they are widened, copies of operands and result instead. A
    column-parallel linear has the input's gradient first, a row-parallel one the weight's."""
    c, wide = sizes.compute_bytes, sizes.wide_bytes
    result = sizes.tokens * inputs * c
    if sizes.operand_bytes > c:
        copies = sizes.tokens * (inputs + outputs) + inputs * outputs
        return copies * sizes.operand_bytes
    # a float32 form of it only where gradients are summed in float32
    widened = wide if sizes.software.gradient_bytes >= wide else 0
    weight = inputs * outputs * (c + widened) if wide > c else 0
    return result + weight if column else max(result, weight)


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
