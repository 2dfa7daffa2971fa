"""The functions and torch modules that compute the operators of a layer. In `plan.layer`, a row is
the description of one operator. The planner and the model both use the rows of
`plan.layer.describe`. For each kind of row, `MAKERS` has a function that makes the torch modules of
the operator and returns the function that computes it. `install` calls these functions for all rows
of a layer. `run` computes the operators in order.

Activations are [s, b, h], for b sequences of s positions and the hidden size h. Under sequence
parallelism, activations outside attention and MLP have only this rank's positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ptdmpi.base.errors import InputError
from ptdmpi.base.plugins import built_in
from ptdmpi.config import ModelConfig
from ptdmpi.model import built
from ptdmpi.model.built import add
from ptdmpi.model.cache import Cache
from ptdmpi.model.documents import Documents
from ptdmpi.model.experts.exchange import ExpertAxis
from ptdmpi.model.experts.routing import Chosen
from ptdmpi.model.kernels import Computing, Kernels
from ptdmpi.model.kernels.activation import Activation
from ptdmpi.model.kernels.attention import AttentionCore, hidden_keys
from ptdmpi.model.kernels.blocks import Scores, Sight
from ptdmpi.model.kernels.norm import Norm, soft_cap
from ptdmpi.model.kernels.rope import Rotating, Rotation
from ptdmpi.model.random import RandomStream, dropout
from ptdmpi.model.sequence.column_parts import ColumnParts
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.sequence.dropout import HiddenDropout
from ptdmpi.model.sequence.heads import all_heads, part_of_heads
from ptdmpi.model.sequence.positions import ALL, Positions
from ptdmpi.model.sequence.ring import Dropping, RingWork, ring_attention
from ptdmpi.model.tensor_parallel import ColumnParallelLinear, TensorAxis
from ptdmpi.plan.layer.attention.exchange import GatherKeys
from ptdmpi.plan.layer.attention.heads import SplitHeads
from ptdmpi.plan.layer.attention.shape import keeps_outputs
from ptdmpi.plan.layer.elementwise import Activate, AddResidual, Normalize
from ptdmpi.plan.layer.folds import read_after
from ptdmpi.plan.layer.operator import Operator, OwnOperator
from ptdmpi.plan.layer.products import Multiply


@dataclass(frozen=True)
class Context:
    """The inputs of a layer's forward pass, except the activation.

    `stream` is the random stream for dropout; None without dropout. `documents` is None if each
    sequence is one document. `rotary` has the cosines and sines of the rotary angles; if it is
    None, the layer uses its own stored cosines and sines. `cache` has the keys and values of
    earlier tokens. `positions` are the positions of the sequence that this rank has inside
    attention and MLP. If the layer is recomputed, `chosen` has the experts that the first forward
    pass has chosen. `factors` maps the name of each router loss to the factor by which its gradient
    is multiplied.
    """

    stream: RandomStream | None = None
    documents: Documents | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    cache: Cache | None = None
    positions: Positions = ALL
    chosen: Chosen | None = None
    factors: Mapping[str, float] = field(default_factory=dict)

    def of_adapters(self, layer: int) -> RandomStream | None:
        """Return the random stream for the dropout of the adapters in layer number `layer`."""
        if self.stream is None:
            return None
        return self.stream.at(layer, 3)


class Build(NamedTuple):
    """The inputs from which a layer's modules are made, in addition to the row of each module (the
    description of its operator). If `selective` is True, the backward recomputes the core of
    attention, softmax(scores) v.
    """

    model: ModelConfig
    axis: TensorAxis
    layer: int
    selective: bool
    context: ContextAxis
    experts: ExpertAxis = ExpertAxis()


class Heads(Rotating):
    """The function that divides the output of attention's first linear layer into queries, keys and
    values by head. The output is [s, b, (a + 2 kv) / t * head size], where a, kv and t are the
    numbers of query heads, key heads and tensor ranks. Queries are [b, a / t, s, head size]. Keys
    and values are [b, kv / t, s, head size]. Queries and keys are normalized and rotated if the
    description `row` says so."""

    def __init__(self, row: SplitHeads, build: Build, norms: Sequence[Norm]) -> None:
        model, axis = build.model, build.axis
        self.head_size = model.head_size
        self.heads = model.heads // axis.size
        # if there are more tensor ranks than key heads, several ranks have copies of a key head,
        # each for its own queries
        self.kv_heads = max(1, model.kv_heads // axis.size)
        self.norms = tuple(norms)
        self.rotation = Rotation()
        self.rotates = row.rotates
        self.joins_heads = row.joins_heads

    def __call__(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values by head for the output x of the linear (shapes: see the
        class)."""
        qkv = x.view(*x.shape[:-1], -1, self.head_size)  # [s, b, (a + 2 kv) / t, head size]
        rotary = None
        if self.rotates:
            rotary = context.rotary or self.rotary
        if rotary is not None and not self.norms:
            both, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
            q, k = self.rotation(both, *rotary).split([self.heads, self.kv_heads], dim=2)
        else:
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if self.norms:
            q, k = (self._turned(x, number, rotary) for number, x in enumerate((q, k)))
        if rotary is not None:
            v = v.clone()  # Copy v, because a view would keep all of qkv in memory.
        # In attention, heads come before positions, because products are computed for each head.
        # All other tensors are [s, b, ...].
        return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)

    def _turned(self, x: Tensor, number: int, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the queries or keys x [s, b, heads, d], normalized and rotated (`rotary` has
        cosines and sines). `number` is 0 for queries and 1 for keys."""
        if self.joins_heads:
            x = self.norms[number](x.flatten(2)).unflatten(-1, (-1, self.head_size))
        elif self.norms:
            x = self.norms[number](x)
        return x if rotary is None else self.rotation(x, *rotary)


class EarlyKeys(Heads):
    """The function that computes three operators together: the first linear layer of attention, the
    division of its output into heads, and the gather of keys and values over the context axis. The
    linear layer is computed by two matrix products: first the keys and values, then the queries.
    Keys and values are gathered while the queries are computed. In the backward, the gradients of
    keys and values are summed over the context axis while the backward of the product of the
    queries is computed."""

    def __init__(
        self, row: SplitHeads, build: Build, norms: Sequence[Norm], linear: ColumnParallelLinear
    ) -> None:
        super().__init__(row, build, norms)
        self.axis, self.layer, self.linear = build.context, build.layer, linear

    def __call__(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries at this rank's positions, and the keys and values at all positions.
        `x` is the input of the linear layer."""
        parts = ColumnParts(self.linear, x, context.of_adapters(self.layer), count=2)
        rotary = (context.rotary or self.rotary) if self.rotates else None
        first, end = self.heads * self.head_size, len(self.linear.weight)
        both = parts.product(slice(first, end)).unflatten(-1, (-1, self.head_size))
        k, v = both.chunk(2, dim=2)
        k = self._turned(k, 1, rotary)
        arriving = self.axis.whole_keys_begin(k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3))
        q = parts.product(slice(0, first)).unflatten(-1, (-1, self.head_size))
        return self._turned(q, 0, rotary).permute(1, 2, 0, 3), *arriving.wait()


class SelfAttention(Computing):
    """Attention softmax(q k^T) v, causal or bidirectional. The inputs are [b, heads, s, head size],
    and the result is [s, b, heads * head size], for this tensor rank's heads. Values and the result
    may have a smaller head size than queries and keys."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        model = build.model
        self.layer = build.layer
        self.rate = model.attention_dropout
        # Each tensor rank has a part of the heads: consecutive heads. `part` is the number of this
        # rank's part. With the context-parallel method "ulysses" (`deals` is True), each part is
        # divided again among the context ranks.
        self.part = build.axis.rank
        self.context = build.context
        self.deals = build.context.exchange == "ulysses"
        if self.deals:
            self.part = self.part * build.context.size + build.context.comm.rank
        self.in_ring = build.context.exchange == "ring"
        self.scores = Scores(
            model.attention_scale,
            model.attention == "causal",
            model.window_of(build.layer),
            model.attention_softcap,
        )
        self.grouped = model.kv_heads != model.heads
        self.attend = AttentionCore(self.scores, grouped=self.grouped)
        # ring attention saves no scores, and a recomputation would send all keys again, so ring
        # attention is never recomputed selectively
        self.selective = build.selective and not self.in_ring

    def take(self, kernels: Kernels) -> None:
        """Compute with the kernels `kernels` from now on."""
        super().take(kernels)
        self.attend = AttentionCore(self.scores, kernels, grouped=self.grouped)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Return the concatenated results of this rank's heads, [s, b, heads * head size of the
        values]."""
        if context.cache is not None:
            core = context.cache.attend(q, k, v, layer=self.layer, core=self.attend)
        elif self.selective:
            # recompute the core of attention, which is cheap to compute but has large tensors
            # (Korthikanti et al. 2022, section 5)
            core = checkpoint(
                self._core, q, k, v, context, use_reentrant=False, preserve_rng_state=False
            )
        else:
            core = self._core(q, k, v, context)
        return core.permute(2, 0, 1, 3).flatten(2)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        positions = ALL if self.deals else context.positions
        sight = Sight(self.scores, context.documents, positions)
        heads, kv_heads = q.shape[1], k.shape[1]
        stream = None
        if context.stream is not None and self.rate > 0.0:
            first = self.part * heads
            stream = context.stream.at(self.layer, 2, positions=positions, first_head=first)
        if self.in_ring:
            dropping = None if stream is None else Dropping.of(stream, q, self.rate)
            work = RingWork(self.context, sight, self.kernels, dropping)
            return ring_attention(q, k, v, work)
        if stream is None:
            return self.attend(q, k, v, context.documents, positions=positions)
        if kv_heads != heads:
            group = heads // kv_heads
            # copy each key head for every query head that shares it, because batched products need
            # as many key heads as query heads
            k = k.repeat_interleave(group, dim=1)
            v = v.repeat_interleave(group, dim=1)
        scores = self.kernels.product(q, k.transpose(-1, -2)) * self.scores.scale
        if self.scores.softcap:
            scores = soft_cap(scores, self.scores.softcap)
        hidden = hidden_keys(k, sight)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        # compute the softmax in a wide type, because a sum of s exponentials in a 16-bit type would
        # lose the small exponentials
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=wide).to(v.dtype)
        keep = stream.attention_mask(weights.shape, self.rate)
        return self.kernels.product(dropout(weights, keep, self.rate), v)


@dataclass(frozen=True)
class Normalized:
    """The function that computes a norm over the hidden channels of each activation."""

    norm: Norm

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        """Return the normalized activations."""
        return self.norm(x)


@dataclass(frozen=True)
class Residual:
    """The function x + dropout(y) for the residual stream x and the output y of a sublayer."""

    dropout: HiddenDropout

    def __call__(self, x: Tensor, y: Tensor, context: Context) -> Tensor:
        """Return x + dropout(y). Raise InputError if the shapes of x and y differ, which means that
        a user's sublayer has changed the positions."""
        if x.shape != y.shape:
            raise InputError(
                "model.sublayers: an operator has changed the positions: the output of its "
                f"sublayer is {list(y.shape)}; legal: {list(x.shape)}"
            )
        if context.stream is not None:
            y = self.dropout(y, context.stream, context.positions)
        return x + y


# `compute(*inputs, context)` returns the output of an operator, or a tuple of outputs
Compute = Callable[..., Tensor | tuple[Tensor, ...]]


class RowStep(NamedTuple):
    """A row (the description of an operator) and the function that computes the operator. `last`
    has the names of the inputs that no later operator reads."""

    row: Operator
    compute: Compute
    last: frozenset[str]


def _norm(owner: nn.Module, row: Operator, build: Build) -> Callable[..., Tensor]:
    assert isinstance(row, Normalize)
    norm = Norm(build.model)
    add(owner, row.name, norm)
    return Normalized(norm)


def _product(owner: nn.Module, row: Operator, build: Build) -> Callable[..., Tensor]:
    assert isinstance(row, Multiply)
    return built.Product(built.added_linear(owner, row, build.axis), build.layer)


def _heads(
    owner: nn.Module, row: Operator, build: Build, linear: ColumnParallelLinear | None = None
) -> Heads:
    assert isinstance(row, SplitHeads)
    norms = [
        Norm(
            build.model,
            shared_gradient=False,
            size=part.size,
            partial_gradient=not row.joins_heads,
        )
        for _, part in row.norms
    ]
    for (name, _), norm in zip(row.norms, norms, strict=True):
        add(owner, name, norm)
    heads = Heads(row, build, norms) if linear is None else EarlyKeys(row, build, norms, linear)
    add(owner, row.name, heads.rotation)
    return heads


def _early_keys(owner: nn.Module, rows: Sequence[Operator], build: Build) -> Heads:
    product, heads, _ = rows
    _product(owner, product, build)
    linear = owner.get_submodule(product.name)
    assert isinstance(linear, ColumnParallelLinear)
    return _heads(owner, heads, build, linear)


def _attention(owner: nn.Module, row: Operator, build: Build) -> Callable[..., Tensor]:
    core = SelfAttention(build)
    add(owner, row.name, core)
    return core


def _whole_keys(owner: nn.Module, row: Operator, build: Build) -> Compute | None:
    if build.context.exchange != "all_gather":
        return None

    def compute(q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return the queries at this rank's positions, and the keys and values at all positions."""
        # copy q, because it is a view of a tensor that also has this rank's k and v; the view would
        # keep k and v in memory, although they are not needed after the gather
        return q.clone(), *build.context.whole_keys(k, v)

    return compute


def _dealt(owner: nn.Module, row: Operator, build: Build) -> Compute | None:
    if build.context.exchange != "ulysses":
        return None

    def compute(q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return queries, keys and values of this rank's part of the heads, at all positions."""
        return part_of_heads(q, k, v, build.context)

    return compute


def _joined(owner: nn.Module, row: Operator, build: Build) -> Compute | None:
    if build.context.exchange != "ulysses":
        return None
    kept = keeps_outputs(build.model, build.selective)

    def compute(y: Tensor, context: Context) -> Tensor:
        """Return the outputs of all heads at this rank's positions."""
        return all_heads(y, build.context, kept=kept)

    return compute


def _activation(owner: nn.Module, row: Operator, build: Build) -> Callable[..., Tensor]:
    assert isinstance(row, Activate)
    function = Activation(row)
    add(owner, row.name, function)
    return function


def _residual(owner: nn.Module, row: Operator, build: Build) -> Callable[..., Tensor]:
    assert isinstance(row, AddResidual)
    module = HiddenDropout(build.model.dropout, (build.layer, row.place), build.axis)
    add(owner, row.name, module)
    return Residual(module)


Maker = Callable[[nn.Module, Operator, Build], Compute | None]
# Name of the class of a row (the description of an operator) -> the function that makes and
# registers the operator's torch modules, and returns the function that computes the operator. The
# result is None if the operator computes nothing in the given layout. The outputs of such an
# operator must have the names of its inputs, so that later operators read the inputs. A function
# that few models need is named as "module:function", and imported only for these models. A new kind
# of operator needs an entry here.
MAKERS: Mapping[str, Maker | str] = {
    "Normalize": _norm,
    "Multiply": _product,
    "SplitHeads": _heads,
    "GatherKeys": _whole_keys,
    "DealHeads": _dealt,
    "Attend": _attention,
    "JoinHeads": _joined,
    "SplitLatents": "ptdmpi.model.latent.makers:latents",
    "ExpandLatents": "ptdmpi.model.latent.makers:expanded",
    "JoinLatents": "ptdmpi.model.latent.makers:heads",
    "ExpandOutputs": "ptdmpi.model.latent.makers:outputs",
    "Activate": _activation,
    "MixExperts": "ptdmpi.model.experts.makers:experts",
    "Concatenate": lambda owner, row, build: lambda x, y, context: torch.cat((x, y), -1),
    "AddResidual": _residual,
}


def maker_of(row: Operator) -> Maker:
    """Return the function that makes and registers the modules for `row` (the description of an
    operator), and returns the function that computes it. If `row` belongs to a sublayer that the
    user has written, a method of `row` makes the module."""
    maker = None if isinstance(row, OwnOperator) else MAKERS.get(type(row).__name__)
    if maker is None:
        return built.own
    return built_in(maker) if isinstance(maker, str) else maker


def install(owner: nn.Module, rows: Sequence[Operator], build: Build) -> tuple[RowStep, ...]:
    """Make the torch modules of `rows` (descriptions of operators), and register them in `owner`.
    Return the steps that `run` computes, in the order of the layer."""
    steps = []
    while rows:
        row, count = rows[0], 1
        if _gathers_early(rows[:3], build):
            row, count = replace(row, outputs=rows[2].outputs), 3
            compute: Compute | None = _early_keys(owner, rows[:3], build)
        else:
            compute = maker_of(row)(owner, row, build)
        rows = rows[count:]
        if compute is not None and isinstance(row, OwnOperator):
            compute = built.checked(compute, row, rows, owner=owner, build=build)
        if compute is None:
            assert row.inputs == row.outputs, f"{row.name} must compute its outputs"
            continue
        last = frozenset(name for name in row.inputs if not read_after(rows, name))
        steps.append(RowStep(row, compute, last))
    return tuple(steps)


def _gathers_early(rows: Sequence[Operator], build: Build) -> bool:
    """Return True if one `EarlyKeys` can compute the operators `rows`.

    There are two conditions. The messages of the context axis must make progress during
    computation, otherwise the gather would not overlap with the product of the queries. The weight
    must be neither quantized nor rounded before each product, because `EarlyKeys` computes two
    products, and both would dequantize or round the whole weight.
    """
    if [type(row) for row in rows] != [Multiply, SplitHeads, GatherKeys]:
        return False
    return build.context.gathers_early and build.model.divides_products


def run(steps: Sequence[RowStep], values: dict[str, Tensor], context: Context) -> dict[str, Tensor]:
    """Compute the operators of `steps`, one after the other. `values` has the inputs of the layer
    by name, and the outputs of the operators are added to it. A tensor is removed after the last
    operator that reads it, so that its memory is freed. Return the tensors that are left after the
    last operator, by name."""
    for row, compute, last in steps:
        inputs = [values.pop(name) if name in last else values[name] for name in row.inputs]
        outputs = compute(*inputs, context)
        if isinstance(outputs, Tensor):
            (name,) = row.outputs
            values[name] = outputs
        else:
            values.update(zip(row.outputs, outputs, strict=True))
    return values
