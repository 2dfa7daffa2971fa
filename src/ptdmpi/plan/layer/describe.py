"""The description of a model: its layers, its embedding and its head, each as a list of operators
in order.

There is no other description of a model. The model is built from these lists, and computes one
operator after the other (`model/transformer.py`). Parameters, time, memory, traffic and FLOPs are
sums and maxima over the lists (`folds.py`). A layer is a list of sublayers. Each sublayer adds its
output to the residual stream x [positions, sequences, hidden size]:

    attention     x -> norm -> qkv -> heads -> core -> out -> x + dropout
    mlp           x -> norm -> up -> activation -> down -> x + dropout

In a layer with experts, the MLP is x -> norm -> router, experts -> x + dropout. In some models,
only some of the layers have experts.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ptdmpi.config import ModelConfig
from ptdmpi.config.adapt import EXPERTS, targets_of
from ptdmpi.config.kinds import LayerKind
from ptdmpi.config.model import SUBLAYERS
from ptdmpi.plan.layer.attention.core import Attend
from ptdmpi.plan.layer.attention.exchange import DealHeads, GatherKeys, JoinHeads
from ptdmpi.plan.layer.attention.heads import SplitHeads
from ptdmpi.plan.layer.elementwise import Activate, AddResidual, Normalize
from ptdmpi.plan.layer.ends import (
    AddRows,
    CrossEntropy,
    DropEmbedding,
    LookUp,
    Predict,
    SelectPositions,
    Tanh,
)
from ptdmpi.plan.layer.experts import MixExperts
from ptdmpi.plan.layer.fitting import RESIDUAL, require_fitting
from ptdmpi.plan.layer.low_bit import LowBit
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.parts import Linear, LowRankPair, Norm, Scale, Sees, Table
from ptdmpi.plan.layer.products import Multiply
from ptdmpi.plan.layer.sublayer import (
    Sublayer,
    made,
    require_operators,
    require_own_masks,
    require_own_names,
)

WORD_TABLE = "word"  # Name of the vocabulary's table, which a tied head shares.


@dataclass(frozen=True)
class LayerBuild:
    """The arguments from which a sublayer is made: the configuration of the model, `adapted` (True
    if the linear layers have adapters), and `mixes` (True if the layer has experts)."""

    model: ModelConfig
    adapted: bool
    mixes: bool

    @property
    def residual_std(self) -> float:
        """Return the initial standard deviation of weights whose outputs are added to the residual
        stream: the standard deviation of other matrices, divided by sqrt(2 x number of layers)
        (Radford et al. 2019, GPT-2, section 2.3)."""
        return self.model.matrix_std / math.sqrt(2 * self.model.layers)

    def product(self, name: str, linear: Linear, source: str, target: str) -> Multiply:
        """Return the operator of a linear layer with its adapters. The operator reads the tensor
        named `source` and writes the tensor named `target`."""
        adapters = adapters_of(self.model, name, linear) if self.adapted else ()
        if self.model.adapt.adapts:
            linear = replace(linear, trains=False)
        quantized = LowBit.of(self.model.quantize)
        return Multiply(
            name=name,
            inputs=(source,),
            outputs=(target,),
            linear=linear,
            adapters=adapters,
            quantized=quantized,
            scaling=self.model.scaling,
        )

    def norm(self, name: str, source: str, target: str) -> Normalize:
        """Return the operator `name` of a norm over the hidden size. The operator reads the tensor
        named `source` and writes the tensor named `target`."""
        part = norm_part(self.model, trains=not self.model.adapt.adapts)
        return Normalize(name, (source,), (target,), part)

    def sublayer(self, name: str, place: int, *operators: Operator) -> Sublayer:
        """Return a sublayer that consists of one or two norms, the operators `operators`, and a
        residual sum. The first of `operators` must read the tensor named "y" (the branch inside the
        residual connection), and the last must write "y".

        `model.block_norm` selects the form of the sublayer: "pre": x + f(norm(x)); "post": norm(x +
        f(x)) (Vaswani et al. 2017, BERT); and "sandwich": x + norm(f(norm(x))) (Ding et al. 2021,
        arXiv 2105.13290). With "post", no norm precedes the operators, so the first operator is
        changed to read the residual stream, "x". `place` is the number of the sublayer's dropout
        mask. No other mask of the layer may have this number (`OTHER_MASKS`). Raise InputError if
        `operators` is empty, or has an object that is no operator.
        """
        require_operators(name, operators)
        residual = AddResidual(
            name=f"{name}.residual",
            inputs=("x", "y"),
            outputs=("x",),
            mask=f"{name}.mask",
            place=place,
        )
        if self.model.block_norm == "post":
            first = replace(operators[0], inputs=("x",))
            last = self.norm(f"{name}_norm", "x", "x")
            return Sublayer(name, (first, *operators[1:], residual, last))
        first = self.norm(f"{name}_norm", "x", "y")
        if self.model.block_norm == "sandwich":
            after = self.norm(f"{name}_post_norm", "y", "y")
            return Sublayer(name, (first, *operators, after, residual))
        return Sublayer(name, (first, *operators, residual))


def attention(build: LayerBuild) -> Sublayer:
    """Return the sublayer of self-attention (Vaswani et al. 2017). The tensor axis divides the
    attention heads."""
    model = build.model
    query = model.attention_width
    key_value = model.kv_heads * model.head_size
    qkv = Linear(
        inputs=model.hidden,
        outputs=(query, key_value, key_value),
        bias=model.qkv_bias,
        init_std=model.matrix_std,
        split="columns",
        most=(model.heads, model.kv_heads, model.kv_heads),
    )
    out = Linear(
        inputs=query,
        outputs=(model.hidden,),
        bias=model.attention_bias,
        init_std=build.residual_std,
        split="rows",
    )
    norms: tuple[tuple[str, Norm], ...] = ()
    if model.qk_norm:
        trains = not model.adapt.adapts
        head = norm_part(model, model.head_size, sees="heads", trains=trains)
        query_norm = key_norm = head
        if model.qk_norm == "all":
            query_norm = norm_part(model, query, sees="all", trains=trains)
            key_norm = norm_part(model, key_value, sees="all", trains=trains)
        norms = (("attention.query_norm", query_norm), ("attention.key_norm", key_norm))
    rotates = model.positions == "rope"
    product = build.product("attention.out", out, "y", "y")
    keeps = product.keeps_input or bool(product.adapters)
    return build.sublayer(
        "attention",
        0,
        build.product("attention.qkv", qkv, "y", "y"),
        SplitHeads(
            name="attention.heads",
            inputs=("y",),
            outputs=("q", "k", "v"),
            norms=norms,
            rotates=rotates,
            joins_heads=model.qk_norm == "all",
        ),
        GatherKeys("attention.keys", ("q", "k", "v"), ("q", "k", "v")),
        DealHeads("attention.dealt", ("q", "k", "v"), ("q", "k", "v")),
        Attend("attention.core", ("q", "k", "v"), ("y",), feeds_kept=keeps),
        JoinHeads("attention.joined", ("y",), ("y",), feeds_kept=keeps),
        replace(product, shares_input=keeps),
    )


def mlp(build: LayerBuild) -> Sublayer:
    """Return the MLP sublayer of a layer: a mixture of experts, or two linear layers with an
    activation function or a gated unit (Shazeer 2020) between them."""
    if build.mixes:
        return _mixture(build)
    return build.sublayer("mlp", 1, *_feed_forward(build, "mlp", build.model.ffn_hidden))


def _linears(build: LayerBuild, width: int) -> tuple[Linear, Linear]:
    """Return the first and the second linear layer of an MLP whose inner width is `width`."""
    model = build.model
    up = Linear(
        inputs=model.hidden,
        outputs=(width,) * model.gates,
        bias=model.mlp_bias,
        init_std=model.matrix_std,
        split="columns",
    )
    return up, Linear(
        inputs=width,
        outputs=(model.hidden,),
        bias=model.mlp_bias,
        init_std=build.residual_std,
        split="rows",
    )


def _feed_forward(
    build: LayerBuild, name: str, width: int, value: str = "y"
) -> tuple[Operator, ...]:
    """Return the operators of an MLP whose inner width is `width`. The first operator reads the
    tensor named "y", and the last operator writes the tensor named `value`."""
    model = build.model
    up, down = _linears(build, width)
    first = build.product(f"{name}.up", up, "y", value)
    # The activation's kernel can add the bias only if no (IA)^3 scales come between bias and GELU.
    before_gelu = up.bias and model.gates == 1 and len(first.pairs) == len(first.adapters)
    return (
        replace(first, before_gelu=before_gelu),
        Activate(
            name=f"{name}.activation",
            inputs=(value,),
            outputs=(value,),
            function=model.activation,
            width=width,
            gates=model.gates,
            bias=("trains" if first.linear.trains else "frozen") if before_gelu else "none",
        ),
        build.product(f"{name}.down", down, value, value),
    )


def _mixture(build: LayerBuild) -> Sublayer:
    """Return the sublayer of a mixture of experts: the router and the experts. If there are shared
    experts, the sublayer also has their MLP, which processes every token (Dai et al. 2024, arXiv
    2401.06066)."""
    model = build.model
    shared: tuple[Operator, ...] = ()
    inputs: tuple[str, ...] = ("y",)
    if model.shared_experts:
        width = model.shared_experts * model.expert_hidden
        shared = _feed_forward(build, "mlp.shared", width, "shared")
        inputs = ("y", "shared")
    sizes = (model.hidden, (model.experts,))
    remembers = model.balance in ("bias", "batch")
    router = Linear(*sizes, remembers, model.init_std, partial_gradient=True)
    trains = not model.adapt.adapts
    up, down = _linears(build, model.expert_hidden)
    adapters = {}
    for end, linear in (("up", up), ("down", down)) if build.adapted else ():
        for name, part in adapters_of(model, f"{EXPERTS}.{end}", linear):
            assert isinstance(part, LowRankPair), "experts have no other adapters"
            adapters[name.removeprefix(f"{EXPERTS}.")] = part
    mix = MixExperts(
        name=EXPERTS,
        inputs=inputs,
        outputs=("y",),
        router=replace(router, trains=trains),
        up=replace(up, trains=trains),
        down=replace(down, trains=trains),
        adapters=tuple(adapters.items()),
        shares_input=any(isinstance(row, Multiply) and row.keeps_input for row in shared[:1]),
        count=model.experts,
        chosen=model.experts_per_token,
        function=model.activation,
    )
    return build.sublayer("mlp", 1, *shared, mix)


def layer(model: ModelConfig, number: int | None = None) -> tuple[Sublayer, ...]:
    """Return the sublayers of layer `number`. If `number` is None, return the sublayers of the last
    layer, which has adapters if any layer has adapters."""
    return layer_of(model, model.kind_of(model.layers - 1 if number is None else number))


def layer_of(model: ModelConfig, kind: LayerKind) -> tuple[Sublayer, ...]:
    """Return the sublayers of a layer of kind `kind` (with or without experts, with or without a
    backward)."""
    build = LayerBuild(model, model.adapt.adapts and not kind.idle, kind.mixes)
    sublayers = tuple(made(SUBLAYERS.get(name, name), build) for name in model.sublayers)
    widths: dict[str, int | None] = {RESIDUAL: model.hidden}
    for name, sublayer in zip(model.sublayers, sublayers, strict=True):
        require_fitting(name, sublayer.operators, model.hidden, widths)
    require_own_names(sublayers)
    require_own_masks(sublayers)
    return _with_norms_of_sums(sublayers)


def _with_norms_of_sums(sublayers: Iterable[Sublayer]) -> tuple[Sublayer, ...]:
    """Return the sublayers of a layer with `follows_sum` set to True in each norm that normalizes
    the residual sum directly before it."""
    marked: list[Sublayer] = []
    before: Operator | None = None
    for sublayer in sublayers:
        rows: list[Operator] = []
        for row in sublayer.operators:
            if isinstance(row, Normalize) and isinstance(before, AddResidual):
                row = replace(row, follows_sum=row.inputs == before.outputs)
            rows.append(row)
            before = row
        marked.append(replace(sublayer, operators=tuple(rows)))
    return tuple(marked)


def norm_part(
    model: ModelConfig, size: int | None = None, *, sees: Sees = "positions", trains: bool = True
) -> Norm:
    """Return the norm (LayerNorm or RMSNorm) that the model uses. The norm is over `size` elements,
    or over the hidden size if `size` is None. `sees` and `trains` are fields of `Norm`."""
    shift = model.norm == "layernorm"
    return Norm(model.hidden if size is None else size, shift, trains, sees)


def adapters_of(
    model: ModelConfig, name: str, linear: Linear
) -> tuple[tuple[str, LowRankPair | Scale], ...]:
    """Return the adapters of the linear layer `name`, as pairs (name, part). The name of an adapter
    is, for example, `attention.qkv.lora_q`."""
    adapt = model.adapt
    adapters: list[tuple[str, LowRankPair | Scale]] = []
    for number, (target, (row, output)) in enumerate(
        targets_of(adapt, model.gates, model.mlps).items()
    ):
        if row != name:
            continue
        leaf = target.rpartition(".")[2]
        most = None if linear.most is None else linear.most[output]
        if adapt.method == "ia3":
            size = linear.inputs if linear.split == "rows" else linear.outputs[output]
            adapters.append((f"{name}.ia3_{leaf}", Scale(size, output, most)))
            continue
        assert linear.split is not None
        pair = LowRankPair(
            inputs=linear.inputs,
            outputs=linear.outputs[output],
            rank=adapt.rank,
            scale=adapt.scale,
            dropout=adapt.dropout,
            number=number,
            output=output,
            split=linear.split,
            most=most,
        )
        adapters.append((f"{name}.lora_{leaf}", pair))
    return tuple(adapters)


def embedding(model: ModelConfig, vocab_size: int) -> tuple[Operator, ...]:
    """Return the operators before the first layer. These operators read the token ids and write the
    residual stream x."""
    h, std = model.hidden, model.init_std
    trains = not model.adapt.adapts
    table = Table(vocab_size, h, std, split=True, trains=trains)
    rows: list[Operator] = [LookUp(WORD_TABLE, ("ids",), ("x",), table)]
    if model.positions == "learned":
        positions = Table(model.seq_length, h, std, trains=trains)
        rows.append(AddRows("position", ("x",), ("x",), positions, by_position=True))
    if model.token_types:
        types = Table(model.token_types, h, std, trains=trains)
        rows.append(AddRows("token_type", ("x", "types"), ("x",), types))
    if model.embedding_norm:
        norm = norm_part(model, trains=trains)
        rows.append(Normalize("norm", ("x",), ("x",), norm, joins=False))
    rows.append(DropEmbedding("dropout", ("x",), ("x",)))
    return tuple(rows)


def head(model: ModelConfig, vocab_size: int) -> tuple[Operator, ...]:
    """Return the operators after the last layer. These operators read the residual stream x and
    write the loss.

    If the weights are tied, the operator "head" uses the table of the embedding as its weight.
    """
    trains = not model.adapt.adapts
    rows: list[Operator] = []
    if model.block_norm != "post":
        norm = norm_part(model, trains=trains)
        rows.append(Normalize("final_norm", ("x",), ("x",), norm, joins=False))
    if model.classifies:
        return (*rows, *_task(model))
    if model.masked:
        rows.append(
            SelectPositions(
                "head.select", ("x",), ("x", "first"), predicted=True, feeds_trained=trains
            )
        )
    if model.output_head == "mlm":
        rows += _masked_transform(model, trains)
    # BERT's output head is the only one with a bias (Devlin et al. 2019, the published weights)
    bias = model.output_head == "mlm" and model.head_bias
    linear = Linear(
        inputs=model.hidden,
        outputs=(vocab_size,),
        bias=bias,
        init_std=model.init_std,
        split="columns",
        trains=trains,
    )
    selected = model.masked
    shares = selected and model.output_head != "mlm"
    rows.append(
        Predict(
            name="head",
            inputs=("x",),
            outputs=("logits",),
            linear=linear,
            selected=selected,
            shares_input=shares,
        )
    )
    rows.append(CrossEntropy("loss", ("logits",), ("loss",), vocab_size))
    if model.sentence_order:
        rows += _sentence_order(model, trains)
    return tuple(rows)


def _masked_transform(model: ModelConfig, trains: bool) -> list[Operator]:
    """Return the operators that BERT has before its output head: linear layer, GELU and norm
    (Devlin et al. 2019). If `trains` is False, the weights of these operators are frozen."""
    h = model.hidden
    dense = Linear(h, (h,), model.head_bias, model.init_std, trains=trains)
    norm = norm_part(model, sees="all", trains=trains)
    return [
        Multiply("mlm.dense", ("x",), ("x",), dense, rows="predicted", shares_input=True),
        Activate(
            name="mlm.activation",
            inputs=("x",),
            outputs=("x",),
            function=model.activation,
            width=h,
            rows="predicted",
            split=False,
        ),
        Normalize("mlm.norm", ("x",), ("x",), norm, rows="predicted", joins=False),
    ]


def _sentence_order(model: ModelConfig, trains: bool) -> list[Operator]:
    """Return the operators that predict whether two segments are in their original order: the
    pooler, a linear layer with two logits, and the loss (Lan et al. 2020, arXiv 1909.11942). If
    `trains` is False, the weights of these operators are frozen."""
    h, std = model.hidden, model.init_std
    pooler = Linear(h, (h,), model.head_bias, std, trains=trains)
    order = Linear(h, (2,), model.head_bias, std, trains=trains)
    return [
        _of_samples("sentence.pooler", "first", "first", pooler, shares_input=True),
        Tanh("sentence.tanh", ("first",), ("first",)),
        _of_samples("sentence.order", "first", "order", order, shares_input=True),
        CrossEntropy("sentence.loss", ("order",), ("order_loss",), 2, split=False),
    ]


def _of_samples(
    name: str, source: str, target: str, linear: Linear, *, shares_input: bool
) -> Multiply:
    """Return the operator of a linear layer that is applied to one position of each sequence. The
    operator reads the tensor named `source` and writes the tensor named `target`. Every
    tensor-parallel rank computes the whole linear layer."""
    return Multiply(name, (source,), (target,), linear, rows="samples", shares_input=shares_input)


def _task(model: ModelConfig) -> list[Operator]:
    """Return the operators of the head of a model that classifies sequences or candidate answers.

    BERT classifies from its first token, through the pooler (Devlin et al. 2019, section 4.1). A
    decoder classifies from its last token, with a single linear layer (Radford et al. 2018). The
    head is trained even if only adapters are trained in the rest of the model, because the head is
    new and has not learned the task yet.
    """
    h, std = model.hidden, model.init_std
    has_backward = model.idle() < model.layers
    rows: list[Operator] = [
        SelectPositions("head.select", ("x",), ("x",), predicted=False, has_backward=has_backward)
    ]
    if model.masked:
        pooler = Linear(h, (h,), model.head_bias, std)
        rows.append(_of_samples("sentence.pooler", "x", "x", pooler, shares_input=has_backward))
        rows.append(Tanh("sentence.tanh", ("x",), ("x",), drops=True))
    classes = Linear(h, (model.classes,), model.masked, std)
    shares = has_backward or model.masked
    rows.append(_of_samples("sentence.classes", "x", "scores", classes, shares_input=shares))
    rows.append(CrossEntropy("loss", ("scores",), ("loss",), model.classes, split=False))
    return rows
