"""What a rank keeps of activations: an inventory of tensors, item by item.

The tables list what the backward pass of one microbatch needs: as autograd keeps it for the code in
`ptdmpi.model`, or, for programs whose attention writes its scores to memory, the layer of
Korthikanti et al. 2022 (arXiv 2205.05198). Tensors that share their storage are one item.
docs/explanation/memory.md explains where the two differ.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ptdmpi.config import Layout, ModelConfig
from ptdmpi.config.choices import RECOMPUTE_MODES
from ptdmpi.config.precision import FLOAT32, PRECISIONS
from ptdmpi.plan.machine.cluster import TRAINER, Software
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.parameters import LowRankPair, Part, Scale

WIDE_BYTES = FLOAT32.bytes


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
        return PRECISIONS[self.precision].compute.bytes

    @property
    def wide_bytes(self) -> int:
        """Bytes of a number in softmaxes, losses and master weights: float32 at least."""
        return PRECISIONS[self.precision].master.bytes

    @property
    def operand_bytes(self) -> int:
        """Bytes of a number in the operands of a product."""
        return self.wide_bytes if self.software.wide_products else self.compute_bytes

    @property
    def boundary_bytes(self) -> int:
        """An activation between two layers, or its gradient, on this rank."""
        return self.local_tokens * self.model.hidden * self.compute_bytes

    @cached_property
    def beside(self) -> dict[str, list[Part]]:
        """What trains beside each linear of a layer, by the linear's name."""
        found: dict[str, list[Part]] = {}
        for name, part in parameters.layer(self.model).items():
            if isinstance(part, LowRankPair | Scale):
                found.setdefault(name.rpartition(".")[0], []).append(part)
        return found

    def multiplied(self, name: str) -> list[LowRankPair]:
        """The products beside a linear of a layer."""
        return [part for part in self.beside.get(name, ()) if isinstance(part, LowRankPair)]

    def keeps_input(self, name: str) -> bool:
        """Whether the input of a linear of a layer is needed for a gradient."""
        return not self.model.adapt.adapts or bool(self.multiplied(name))

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
    keeps = sizes.keeps_input("attention.qkv") or model.block_norm == "post"
    return [
        *norm_items(sizes, "attention_norm", first[0]),
        *([Item("attention.qkv.input", local, c, first[1])] if keeps else ()),
        *_beside(sizes, "attention.qkv"),
        *(_query_key_norms(sizes) if model.qk_norm else ()),
        *_attention_core(sizes, mode),
        Item("attention.out.input", sizes.tokens * sizes.share(model.attention_width), c),
        *_beside(sizes, "attention.out"),
        *(norm_items(sizes, "attention_post_norm") if model.block_norm == "sandwich" else ()),
        *(Item("attention.mask", size, 1) for size in mask),
        *norm_items(sizes, "mlp_norm"),
        *([Item("mlp.up.input", local, c)] if sizes.keeps_input("mlp.up") else ()),
        *_beside(sizes, "mlp.up"),
        Item("mlp.activation.input", model.gates * ffn, c),
        *([Item("mlp.down.input", ffn, c)] if sizes.keeps_input("mlp.down") else ()),
        *_beside(sizes, "mlp.down"),
        *(norm_items(sizes, "mlp_post_norm") if model.block_norm == "sandwich" else ()),
        *(Item("mlp.mask", size, 1) for size in mask),
    ]


def _beside(sizes: Sizes, name: str) -> Iterator[Item]:
    """What adapters of a linear keep: the narrow product of LoRA, what (IA)^3 has multiplied."""
    for number, part in enumerate(sizes.beside.get(name, ())):
        (*_, width) = part.weights(sizes.layout.tensor)
        if isinstance(part, LowRankPair):
            width = part.rank
        yield Item(f"{name}.adapter{number}", sizes.tokens * width, sizes.compute_bytes)


def norm_items(
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
        repeats = sizes.software.repeats_keys and not model.attention_softcap
        if repeats and c >= sizes.wide_bytes and kv_heads < heads:
            yield Item("attention.key_value.copy", 2 * heads * per_head, c, "none")
        if sizes.software.kept_block:
            yield Item("attention.probabilities", heads * _kept_scores(sizes), c, "none")
        if sizes.operand_bytes != c:
            yield Item("attention.output.copy", rows * model.head_size, sizes.wide_bytes, "none")


def _kept_scores(sizes: Sizes) -> int:
    """Probabilities that each head keeps of a microbatch: of blocks of queries, each with all keys
    up to its end, whatever windows and documents hide of them."""
    model, block = sizes.model, sizes.software.kept_block
    if model.attention != "causal" or model.attention_softcap:
        return 0
    ends = [min(first + block, model.seq_length) for first in range(0, model.seq_length, block)]
    begins = (0, *ends)
    each = sum(end * (end - begin) for begin, end in zip(begins, ends, strict=False))
    return each * sizes.layout.micro_size


def embedding_activations(sizes: Sizes) -> list[Item]:
    items: list[Item] = []
    if sizes.model.adapt.adapts:  # nothing in front of the first adapter has a backward
        return items
    if sizes.layout.tensor > 1:
        items.append(Item("embedding.ids", sizes.tokens, 8))
        items.append(Item("embedding.elsewhere", sizes.tokens, 1))
    if sizes.model.embedding_norm:
        items += norm_items(sizes, "embedding.norm")
    if sizes.drops:
        items.append(Item("embedding.mask", sizes.local_tokens * sizes.model.hidden, 1))
    return items
