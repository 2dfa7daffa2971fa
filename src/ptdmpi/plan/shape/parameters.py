"""Every parameter of a model, by part: the one table that the model is built from and the planner
counts. Without torch, so that a login node can ask.

A part is a linear, a norm or a table; `ptdmpi.model` makes each of them from what stands here, and
gives its weights these names.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ptdmpi.config import ModelConfig
from ptdmpi.config.adapt import targets_of

# Every parameter starts at a multiple of this many elements, and every shard, so that vectorised
# kernels handle each element alike (no scalar tails) wherever it stands: its bits depend neither on
# its neighbours nor on the rank that holds it. Norms are taken by rows of this length, which no cut
# divides, for the same reason.
ALIGNMENT = 256


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b; W is [sum(outputs), inputs].

    `split`: how the tensor axis divides it: "columns" the outputs (each of them on its own, such as
    q, k, v), "rows" the inputs; None: every rank holds all. `most`: into how many shares each of
    the outputs can be divided (a head is never cut); None: into t. `init_std`: of the initial
    weights. `trains`, here and of the other parts: without it the part has weights alone, no
    gradients, masters or moments.
    """

    inputs: int
    outputs: tuple[int, ...]
    bias: bool
    init_std: float
    split: Literal["columns", "rows"] | None = None
    most: tuple[int, ...] | None = None
    trains: bool = True

    def local(self, tensor: int) -> tuple[int, int]:
        """(inputs, outputs) of one tensor rank, padded where t does not divide them."""
        if self.split == "rows":
            return -(-self.inputs // tensor), sum(self.outputs)
        parts = tensor if self.split == "columns" else 1
        most = self.most or (parts,) * len(self.outputs)
        shares = zip(self.outputs, most, strict=True)
        return self.inputs, sum(-(-part // min(parts, one)) for part, one in shares)

    def weights(self, tensor: int) -> Iterator[int]:
        """Elements of each of its weights on one tensor rank; the bias of a linear that is split by
        rows stands behind the sum, on every rank."""
        inputs, outputs = self.local(tensor)
        yield inputs * outputs
        if self.bias:
            yield outputs


@dataclass(frozen=True)
class Norm:
    """A scale of [h] (or of a head's size), and of a LayerNorm also a shift."""

    size: int
    shift: bool
    trains: bool = True

    def weights(self, tensor: int) -> Iterator[int]:
        """Elements of each of its weights, on every tensor rank alike."""
        yield from [self.size] * (2 if self.shift else 1)


@dataclass(frozen=True)
class Table:
    """[rows, h], which are looked up; `split`: the tensor axis divides the rows (a vocabulary)."""

    rows: int
    hidden: int
    init_std: float
    split: bool = False
    trains: bool = True

    def weights(self, tensor: int) -> Iterator[int]:
        """Elements of it on one tensor rank, padded where t does not divide the rows."""
        yield -(-self.rows // (tensor if self.split else 1)) * self.hidden


@dataclass(frozen=True)
class LowRankPair:
    """`scale` B A beside a linear, or beside one of its outputs: A is [rank, inputs], B [outputs,
    rank] (Hu et al. 2021, arXiv 2106.09685, equation 3).

    `split` is that of the linear: "columns" divides the rows of B, into at most `most` shares, and
    each tensor rank has a part of A's gradient; "rows" divides the columns of A, and each has a
    part of B's. `dropout`: of the input. `number` tells the adapters of a layer apart, `output` is
    which of the linear's it stands beside.
    """

    inputs: int
    outputs: int
    rank: int
    scale: float
    dropout: float
    number: int
    output: int
    split: Literal["columns", "rows"]
    most: int | None = None
    trains: bool = True

    def local(self, tensor: int) -> tuple[int, int]:
        """(inputs, outputs) of one tensor rank, padded where t does not divide them."""
        if self.split == "rows":
            return -(-self.inputs // tensor), self.outputs
        return self.inputs, -(-self.outputs // min(tensor, self.most or tensor))

    def weights(self, tensor: int) -> Iterator[int]:
        """Elements of A and of B on one tensor rank."""
        inputs, outputs = self.local(tensor)
        yield self.rank * inputs
        yield outputs * self.rank

    @property
    def partial(self) -> int:
        """Elements of the one of whose gradient each tensor rank has a part."""
        return self.rank * (self.inputs if self.split == "columns" else self.outputs)


@dataclass(frozen=True)
class Scale:
    """A factor for each channel behind a linear, or in front of one that is split by rows; the
    tensor axis divides them into at most `most` shares (Liu et al. 2022, arXiv 2205.05638, section
    3.3). `output`: of which of the linear's outputs."""

    size: int
    output: int = 0
    most: int | None = None
    trains: bool = True

    def weights(self, tensor: int) -> Iterator[int]:
        """Elements on one tensor rank."""
        yield -(-self.size // min(tensor, self.most or tensor))


Part = Linear | Norm | Table | LowRankPair | Scale
Parts = Mapping[str, Part]


def as_linear(part: Part, split: Literal["columns", "rows"] | None) -> Linear:
    """`part`, which is a linear split so; raises TypeError if it is not."""
    if not isinstance(part, Linear) or part.split != split:
        raise TypeError(f"{part} is no linear split by {split}")
    return part


def as_table(part: Part, split: bool) -> Table:
    """`part`, which is a table split or not; raises TypeError if it is not."""
    if not isinstance(part, Table) or part.split != split:
        raise TypeError(f"{part} is no table with split = {split}")
    return part


WORD_TABLE = "word"  # the part of the embedding that a tied head shares


def norm(model: ModelConfig, size: int | None = None) -> Norm:
    """Any norm of the model; of [h], or of `size`."""
    return Norm(model.hidden if size is None else size, model.norm == "layernorm")


def layer(model: ModelConfig, number: int | None = None) -> dict[str, Part]:
    """One layer: attention and MLP, each with its norms, and the adapters that layer `number` has;
    None: the last one, which has them if any has."""
    h, ffn, std = model.hidden, model.ffn_hidden, model.init_std
    query, key_value = model.attention_width, model.kv_heads * model.head_size
    most = (model.heads, model.kv_heads, model.kv_heads)
    # smaller by sqrt(2 l) where outputs add up in the residual stream (GPT-2, section 2.3)
    residual_std = std / math.sqrt(2 * model.layers)
    qkv, up = (query, key_value, key_value), (ffn,) * model.gates
    parts: dict[str, Part] = {
        "attention_norm": norm(model),
        "attention.qkv": Linear(h, qkv, model.qkv_bias, std, "columns", most),
        "attention.out": Linear(query, (h,), model.attention_bias, residual_std, "rows"),
        "mlp_norm": norm(model),
        "mlp.up": Linear(h, up, model.mlp_bias, std, "columns"),
        "mlp.down": Linear(ffn, (h,), model.mlp_bias, residual_std, "rows"),
    }
    if model.qk_norm:
        for name in ("attention.query_norm", "attention.key_norm"):
            parts[name] = norm(model, model.head_size)
    if model.block_norm == "sandwich":
        parts |= {"attention_post_norm": norm(model), "mlp_post_norm": norm(model)}
    last = model.layers - 1
    idle = (last if number is None else number) < model.adapt.first_layer
    return _frozen(model, parts) | ({} if idle else adapters(model, parts))


def adapters(model: ModelConfig, parts: Parts) -> dict[str, Part]:
    """What trains beside the linears of a layer: `attention.qkv.lora_q` and so on."""
    adapt, found = model.adapt, dict[str, Part]()
    for number, (target, (name, output)) in enumerate(targets_of(adapt, model.gates).items()):
        linear, leaf = parts[name], target.rpartition(".")[2]
        assert isinstance(linear, Linear) and linear.split is not None
        outputs = linear.outputs[output]
        most = None if linear.most is None else linear.most[output]
        if adapt.method == "ia3":
            rows = linear.split == "rows"
            size = linear.inputs if rows else outputs
            found[f"{name}.ia3_{leaf}"] = Scale(size, output, most)
        else:
            found[f"{name}.lora_{leaf}"] = LowRankPair(
                linear.inputs,
                outputs,
                adapt.rank,
                adapt.scale,
                adapt.dropout,
                number,
                output,
                linear.split,
                most,
            )
    return found


def _frozen(model: ModelConfig, parts: dict[str, Part]) -> dict[str, Part]:
    """As they are, or, where adapters train beside them, without training."""
    if not model.adapt.adapts:
        return parts
    return {name: replace(part, trains=False) for name, part in parts.items()}


def embedding(model: ModelConfig, vocab_size: int) -> dict[str, Part]:
    """In front of the first layer."""
    h, std = model.hidden, model.init_std
    parts: dict[str, Part] = {WORD_TABLE: Table(vocab_size, h, std, split=True)}
    if model.positions == "learned":
        parts["position"] = Table(model.seq_length, h, std)
    if model.token_types:
        parts["token_type"] = Table(model.token_types, h, std)
    if model.embedding_norm:
        parts["norm"] = norm(model)
    return _frozen(model, parts)


def head(model: ModelConfig, vocab_size: int) -> dict[str, Part]:
    """Behind the last layer; the weight of "head" is the embedding's, where they are tied."""
    h, std, biased = model.hidden, model.init_std, model.head_bias
    masked = model.output_head == "mlm"
    parts: dict[str, Part] = {}
    if model.block_norm != "post":
        parts["final_norm"] = norm(model)
    if model.classifies:
        # as BERT classifies: from its first token, through the pooler (Devlin et al. 2019,
        # section 4.1); a decoder from its last one, by a linear alone (Radford et al. 2018). Beside
        # adapters it trains, too: what is frozen knows nothing of the task
        pooler = {"sentence.pooler": Linear(h, (h,), biased, std)} if model.masked else {}
        classes = Linear(h, (model.classes,), model.masked, std)
        return _frozen(model, parts) | pooler | {"sentence.classes": classes}
    if masked:
        parts["mlm.dense"] = Linear(h, (h,), biased, std)
        parts["mlm.norm"] = norm(model)
    # of the outputs only BERT's has a bias (Devlin et al. 2019, the published weights)
    parts["head"] = Linear(h, (vocab_size,), masked and biased, std, "columns")
    if model.sentence_order:
        parts["sentence.pooler"] = Linear(h, (h,), biased, std)
        parts["sentence.order"] = Linear(h, (2,), biased, std)
    return _frozen(model, parts)


def task_head(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that a model has for a task, which one that was trained on
    text may lack; none where it has no such head."""
    found: dict[str, tuple[int, ...]] = {}
    for name, part in head(model, 0).items() if model.classifies else ():
        if name != "final_norm":
            linear = as_linear(part, None)
            found[f"{name}.weight"] = (sum(linear.outputs), linear.inputs)
            if linear.bias:
                found[f"{name}.bias"] = (sum(linear.outputs),)
    return found


def aligned(size: int) -> int:
    """Elements that a parameter of `size` takes in a flat buffer."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def elements(parts: Iterable[Part], tensor: int = 1) -> int:
    """Elements of all these parts on one of `tensor` tensor ranks."""
    return sum(sum(part.weights(tensor)) for part in parts)


def trained(parts: Iterable[Part]) -> list[Part]:
    """Those that train."""
    return [part for part in parts if part.trains]


def layer_elements(model: ModelConfig, tensor: int = 1) -> int:
    """Parameters of one layer on one tensor rank."""
    return elements(layer(model).values(), tensor)


def trained_elements(model: ModelConfig, tensor: int = 1) -> int:
    """Those of them that train."""
    return elements(trained(layer(model).values()), tensor)


def table_elements(model: ModelConfig, vocab_size: int, tensor: int = 1) -> int:
    """The vocabulary's table on one tensor rank."""
    return elements([embedding(model, vocab_size)[WORD_TABLE]], tensor)


def embedding_elements(model: ModelConfig, vocab_size: int, tensor: int = 1) -> int:
    """Parameters in front of the first layer on one tensor rank."""
    return elements(embedding(model, vocab_size).values(), tensor)


def head_elements(model: ModelConfig, vocab_size: int, tensor: int = 1) -> int:
    """Parameters behind the last layer on one tensor rank, a table of its own included."""
    return elements(head(model, vocab_size).values(), tensor)


def places(
    model: ModelConfig,
    vocab_size: int,
    layers: int,
    ends: tuple[bool, bool],
    tensor: int,
    trains: bool = True,
    idle: int = 0,
) -> list[list[int]]:
    """What sharding gathers and sums at once, in elements on a tensor rank: the units of each place
    (embedding, a layer, the head) of a stage with so many layers, the first of them `idle`, that
    is, as `ends` says, the first or the last of the model. A tied table is a unit of its own at
    both places. Of what trains; or of what does not, which is gathered alone
    (`low_bit.frozen_places`)."""

    def counted(parts: Iterable[Part]) -> int:
        return elements((part for part in parts if part.trains == trains), tensor)

    first, last = ends
    table = counted([embedding(model, vocab_size)[WORD_TABLE]]) * model.tie_embeddings
    found = [[counted(layer(model, 0).values())]] * idle
    found += [[counted(layer(model).values())]] * (layers - idle)
    if first:
        front = counted(embedding(model, vocab_size).values())
        found = [[table, front - table], *found]
    if last:
        behind = counted(head(model, vocab_size).values())
        found = [*found, [table, behind - table]]
    return [[unit for unit in place if unit] for place in found]


def rank_elements(
    model: ModelConfig,
    vocab_size: int,
    layers: int,
    ends: tuple[bool, bool],
    tensor: int,
    idle: int,
) -> tuple[int, int, int]:
    """(parameters, those of them that train, those of these that stand for two) of a rank with so
    many layers, some of them `idle`, and, as `ends` says, the first or the last of the model. A
    tied table is counted once; its second use has a gradient of its own."""
    first, last = ends
    table = embedding(model, vocab_size)
    held = ((idle, layer(model, 0)), (layers - idle, layer(model)))
    held_ends = ((int(first), table), (int(last), head(model, vocab_size)))
    count = train = 0
    for times, parts in (*held, *held_ends):
        count += times * elements(parts.values(), tensor)
        train += times * elements(trained(parts.values()), tensor)
    if not (first and last and model.tie_embeddings):
        return count, train, 0
    shared = elements([table[WORD_TABLE]], tensor)
    twice = shared * table[WORD_TABLE].trains
    return count - shared, train - twice, twice


def parameter_count(model: ModelConfig, vocab_size: int) -> int:
    """Parameters of the whole model, a tied head counted once."""
    idle = model.idle()
    count = idle * elements(layer(model, 0).values())
    count += (model.layers - idle) * layer_elements(model)
    count += embedding_elements(model, vocab_size) + head_elements(model, vocab_size)
    return count - table_elements(model, vocab_size) * model.tie_embeddings
