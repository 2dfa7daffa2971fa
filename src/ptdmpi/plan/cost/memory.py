"""What a rank keeps of activations: an inventory of tensors, item by item.

The tables list what the backward pass of one microbatch needs, as autograd keeps it for the code in
`ptdmpi.model`, and, for comparison, for the layer of Korthikanti et al. 2022 (arXiv 2205.05198).
Tensors that share their storage are one item. docs/memory.md explains where the two differ.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ptdmpi.config import Config
from ptdmpi.plan.cost.stages import head_in_layers, split_layers
from ptdmpi.plan.schedule import orders as schedules
from ptdmpi.plan.schedule.held import most_held

COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
MODES = ("none", "selective", "full")
MASK_CHUNK_ELEMENTS = 2**18  # of a dropout mask, drawn at once (on a CPU)


@dataclass(frozen=True)
class Item:
    """`elements` of `element_bytes` each; `kept_up_to` is the last of `MODES` that keeps it."""

    name: str
    elements: int
    element_bytes: int
    kept_up_to: str = "selective"

    @property
    def bytes(self) -> int:
        return self.elements * self.element_bytes


def kept(items: Sequence[Item], mode: str) -> list[Item]:
    """Those of `items` that recomputation `mode` keeps until the backward pass."""
    return [item for item in items if MODES.index(mode) <= MODES.index(item.kept_up_to)]


def total_bytes(items: Sequence[Item]) -> int:
    return sum(item.bytes for item in items)


@dataclass(frozen=True)
class Sizes:
    """The sizes of `config` on one rank, for one microbatch.

    `wide_products`: half types are multiplied in float32, on widened copies, as on a CPU without
    instructions for them.
    """

    config: Config
    wide_products: bool = False

    @property
    def tokens(self) -> int:
        """s b."""
        return self.config.model.seq_length * self.config.batch.micro_size

    @property
    def local_tokens(self) -> int:
        """Positions of this rank between the blocks: s b, or s b / t under sequence parallelism."""
        parallel = self.config.parallel
        return self.tokens // (parallel.tensor if parallel.sequence_parallel else 1)

    @property
    def predicted(self) -> int:
        """Positions of a microbatch whose tokens are asked for: s b, or the masked ones."""
        return self.config.model.predictions() * self.config.batch.micro_size

    @property
    def compute_bytes(self) -> int:
        return COMPUTE_BYTES[self.config.precision.compute]

    @property
    def wide_bytes(self) -> int:
        """Of softmaxes, losses and master weights: float32 at least."""
        return max(4, self.compute_bytes)

    @property
    def operand_bytes(self) -> int:
        """Of the operands of a product."""
        return self.wide_bytes if self.wide_products else self.compute_bytes

    def share(self, size: int) -> int:
        """A tensor rank's part of `size`, padded where t does not divide it."""
        return -(-size // self.config.parallel.tensor)

    def recomputed(self, layer: int) -> str:
        """The recomputation mode of a layer."""
        recompute = self.config.recompute
        beyond = recompute.layers != "all" and layer >= recompute.layers
        return "none" if recompute.mode == "full" and beyond else recompute.mode


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
    """All items of one layer of this code; under `mode` some of them are recomputed (see `kept`).

    The layer runs alike in every mode, but for what the attention core's products work on: where
    that is a copy of query, key and value, these stay for the core's recomputation only.
    """
    model, c = sizes.config.model, sizes.compute_bytes
    local = sizes.local_tokens * model.hidden
    ffn = sizes.tokens * sizes.share(model.ffn_hidden)
    gates = 2 if model.activation == "swiglu" else 1
    mask = [local] if model.dropout > 0.0 else []
    # the input of the layer is all that full recomputation keeps
    first = {"pre": ("full", "selective"), "post": ("selective", "full")}[model.block_norm]
    return [
        *_norm(sizes, "attention_norm", first[0]),
        Item("attention.qkv.input", local, c, first[1]),
        *_attention_core(sizes, mode),
        Item("attention.out.input", sizes.tokens * sizes.share(model.hidden), c),
        *(Item("attention.mask", size, 1) for size in mask),
        *_norm(sizes, "mlp_norm"),
        Item("mlp.up.input", local, c),
        Item("mlp.activation.input", gates * ffn, c),
        Item("mlp.down.input", ffn, c),
        *(Item("mlp.mask", size, 1) for size in mask),
    ]


def _norm(
    sizes: Sizes, name: str, kept_up_to: str = "selective", rows: int | None = None
) -> Iterator[Item]:
    """Of `rows` positions; None: of those that this rank has between the blocks."""
    model, rows = sizes.config.model, sizes.local_tokens if rows is None else rows
    yield Item(f"{name}.input", rows * model.hidden, sizes.compute_bytes, kept_up_to)
    if model.norm == "layernorm":
        yield Item(f"{name}.statistics", 2 * rows, sizes.compute_bytes)  # mean, 1 / deviation
    else:
        yield Item(f"{name}.statistics", rows, sizes.wide_bytes)  # 1 / root mean square


def _attention_core(sizes: Sizes, mode: str) -> Iterator[Item]:
    """From query, key and value to the heads' outputs, which are the next linear's input."""
    model, c = sizes.config.model, sizes.compute_bytes
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
        yield Item("attention.softmax", scores, sizes.wide_bytes, "none")
        yield Item("attention.softmax.mask", scores, 1, "none")
        yield Item("attention.softmax.dropped", scores, sizes.operand_bytes, "none")
    else:
        yield Item("attention.logsumexp", rows, sizes.wide_bytes, "none")
        if sizes.operand_bytes != c:
            yield Item("attention.output.copy", rows * model.head_size, sizes.wide_bytes, "none")


def embedding_activations(sizes: Sizes) -> list[Item]:
    items = []
    if sizes.config.parallel.tensor > 1:
        items.append(Item("embedding.ids", sizes.tokens, 8))
        items.append(Item("embedding.elsewhere", sizes.tokens, 1))
    if sizes.config.model.embedding_norm:
        items += _norm(sizes, "embedding.norm")
    if sizes.config.model.dropout > 0.0:
        items.append(Item("embedding.mask", sizes.local_tokens * sizes.config.model.hidden, 1))
    return items


def head_activations(sizes: Sizes, vocab_size: int) -> list[Item]:
    """Final norm, output head and cross-entropy."""
    model, c = sizes.config.model, sizes.compute_bytes
    local = sizes.local_tokens * model.hidden
    logits = sizes.predicted * sizes.share(vocab_size)
    return [
        *(_norm(sizes, "final_norm") if model.block_norm == "pre" else ()),
        *(_masked_head(sizes) if model.masked else [Item("head.input", local, c)]),
        Item("loss.probabilities", logits, sizes.wide_bytes),
        Item("loss.labels", sizes.predicted, 8),
        Item("loss.here", sizes.predicted, 1),
    ]


def _masked_head(sizes: Sizes) -> Iterator[Item]:
    """What is kept of the masked positions, and of the first one of each sample."""
    model, c = sizes.config.model, sizes.compute_bytes
    b, hidden = sizes.config.batch.micro_size, sizes.predicted * model.hidden
    yield Item("head.positions", sizes.predicted + b, 8)
    yield Item("head.selected", hidden + b * model.hidden, c)
    if model.output_head == "mlm":
        yield Item("mlm.activation.input", hidden, c)
        yield from _norm(sizes, "mlm.norm", rows=sizes.predicted)
        yield Item("head.input", hidden, c)
    if model.sentence_order:
        yield Item("sentence.order.input", b * model.hidden, c)


def stage_activations(sizes: Sizes, vocab_size: int, layers: range) -> list[Item]:
    """What one microbatch keeps in the stage of `layers`, from its forward to its backward.

    The input of a stage behind the first is the input of its first layer.
    """
    items: list[Item] = []
    if layers.start == 0:
        items += embedding_activations(sizes)
    for layer in layers:
        mode = sizes.recomputed(layer)
        items += kept(layer_activations(sizes, mode), mode)
    if layers.stop == sizes.config.model.layers:
        items += head_activations(sizes, vocab_size)
    return items


def backward_working_bytes(sizes: Sizes, vocab_size: int, layers: range) -> int:
    """The most that a stage's backward pass needs beside what `stage_activations` lists.

    Looked at where it can be most: at the loss, and in each layer behind the MLP and in the
    attention core. What is recomputed comes on top there, what has been used by then is gone.
    """
    most = freed = 0
    if layers.stop == sizes.config.model.layers:
        freed = total_bytes(head_activations(sizes, vocab_size))
        logits = sizes.predicted * sizes.share(vocab_size)
        # The gradient takes the place of the probabilities. For a half type it is converted beside
        # them, and the head's products may widen it once more.
        half = sizes.compute_bytes < sizes.wide_bytes
        most = logits * (sizes.wide_bytes + sizes.compute_bytes) * half
    for layer in reversed(layers):
        mode = sizes.recomputed(layer)
        items = layer_activations(sizes, mode)
        stays = total_bytes(kept(items, mode))
        dropped = total_bytes(items) - stays
        mlp = total_bytes([item for item in items if item.name.startswith("mlp")])
        early = dropped if mode == "full" else 0
        most = max(most, early + _mlp_backward(sizes) - freed)
        if mode == "full":
            most = max(most, early + _drawing_a_mask(sizes) - freed)
        most = max(most, dropped - mlp + _core_backward(sizes) - freed)
        freed += stays
    return most


def _mlp_backward(sizes: Sizes) -> int:
    """At the second linear, the activation function and the first linear, whatever is most; the
    gradient of the output is held throughout."""
    model, c = sizes.config.model, sizes.compute_bytes
    held = sizes.local_tokens * model.hidden * c
    if sizes.local_tokens < sizes.tokens:
        held += sizes.tokens * model.hidden * c  # gathered
    ffn = sizes.share(model.ffn_hidden)
    up = (2 if model.activation == "swiglu" else 1) * ffn
    down_linear = _linear_backward(sizes, ffn, model.hidden, column=False)
    # what is behind them is gone: first the second linear's input, then the activation's too
    activation = sizes.tokens * c * (up + ffn * (model.activation == "swiglu"))
    up_linear = _linear_backward(sizes, model.hidden, up, column=True) - sizes.tokens * ffn * c
    return held + max(down_linear, activation, up_linear)


def _hash_bytes(elements: int) -> int:
    """What drawing a dropout mask needs: int64, three at a time."""
    return 3 * 8 * min(elements, MASK_CHUNK_ELEMENTS)


def _drawing_a_mask(sizes: Sizes) -> int:
    """The last act of a layer's recomputation: hashes beside what they drop from and the gradient
    that waits."""
    model = sizes.config.model
    if model.dropout == 0.0:
        return 0
    local = sizes.local_tokens * model.hidden
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
    weight = inputs * outputs * (c + wide) if wide > c else 0
    return result + weight if column else max(result, weight)


def _core_backward(sizes: Sizes) -> int:
    """Gradients of the softmax's output and input, or, in recomputation, the hashes of its mask
    beside scores and weights; FlashAttention has the gradients of its operands."""
    model, c = sizes.config.model, sizes.compute_bytes
    rows = sizes.tokens * sizes.share(model.heads)
    held = sizes.local_tokens * model.hidden * c
    if model.attention_dropout > 0.0:
        scores = rows * model.seq_length
        drawing = _hash_bytes(scores) + 2 * scores * c
        return held + max(scores * 2 * sizes.wide_bytes, drawing)
    return held + 4 * rows * model.head_size * sizes.operand_bytes


def stages_of(config: Config, vocab_size: int, pipeline_rank: int) -> dict[int, range]:
    """Stage number -> its layers, of one pipeline rank."""
    parallel, model = config.parallel, config.model
    p, v = parallel.pipeline, parallel.virtual
    placed = schedules.placement(parallel.schedule, p, v)
    layers = split_layers(model.layers, placed, head_in_layers(model, vocab_size))
    return {stage: layers[stage] for stage in placed.stages_of(pipeline_rank)}


def peak_activation_bytes(sizes: Sizes, vocab_size: int, pipeline_rank: int) -> int:
    """The most bytes of activations on one pipeline rank at any moment of its schedule.

    What the microbatches in flight keep, what the running op needs beside, and one tensor each way
    on either side where there is another stage: an activation and a gradient.
    """
    config = sizes.config
    parallel = config.parallel
    stages = stages_of(config, vocab_size, pipeline_rank)
    keeps, works = {}, {}
    for stage, layers in stages.items():
        keeps[stage] = total_bytes(stage_activations(sizes, vocab_size, layers))
        works[stage] = backward_working_bytes(sizes, vocab_size, layers)
    microbatches = config.microbatches
    if parallel.schedule != "gpipe":  # filled by then, and from there on ever the same
        microbatches = min(microbatches, 3 * parallel.pipeline)
    placed = schedules.placement(parallel.schedule, parallel.pipeline, parallel.virtual)
    order = schedules.order(parallel.schedule, placed, microbatches, pipeline_rank)
    peak = int(most_held(order, lambda _, stage: keeps[stage], works.__getitem__))
    before = any(stage > 0 for stage in stages)
    behind = any(stage + 1 < parallel.pipeline * parallel.virtual for stage in stages)
    boundary = sizes.local_tokens * config.model.hidden * sizes.compute_bytes
    return peak + 2 * boundary * (before + behind)
