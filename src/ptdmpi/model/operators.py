"""The operators of a layer: one module for each kind of row in `plan.layer`, and the functions that
run the rows. A row describes one operator.

`install` makes the modules of some rows and registers them under the names of the rows. `run` calls
the modules in order. The planner uses the same rows of `plan.layer.describe`, so the planner and
the model cannot disagree. All modules use a tensor axis; with an axis of size 1 the model is
serial. Activations are [s, b, h]; between blocks under sequence parallelism, they have only this
rank's positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ptdmpi.config import ModelConfig
from ptdmpi.model import built
from ptdmpi.model.cache import KeyValueCache
from ptdmpi.model.documents import Documents
from ptdmpi.model.experts.exchange import ExpertAxis
from ptdmpi.model.experts.mixture import Mixture, Router
from ptdmpi.model.experts.routing import Chosen, Routing
from ptdmpi.model.kernels import Computing, Kernels
from ptdmpi.model.kernels.activation import gated, gelu
from ptdmpi.model.kernels.attention import AttentionCore, hidden_keys
from ptdmpi.model.kernels.blocks import Scores, Sight
from ptdmpi.model.kernels.norm import rms_norm, soft_cap
from ptdmpi.model.kernels.rope import rotate
from ptdmpi.model.parameters import declare
from ptdmpi.model.random import RandomStream, dropout
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.sequence.heads import all_heads, part_of_heads
from ptdmpi.model.sequence.positions import ALL, Positions
from ptdmpi.model.sequence.ring import Dropping, RingWork, ring_attention
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layer import describe
from ptdmpi.plan.layer.attention import Attend, SplitHeads
from ptdmpi.plan.layer.context import DealHeads, GatherKeys, JoinHeads, keeps_outputs
from ptdmpi.plan.layer.elementwise import Activate, AddResidual, Normalize
from ptdmpi.plan.layer.experts import MixExperts
from ptdmpi.plan.layer.operator import Operator, OwnOperator
from ptdmpi.plan.layer.products import Multiply


@dataclass(frozen=True)
class Context:
    """Inputs of a forward pass other than the activation.

    `stream` is the random stream for dropout; None without dropout. `documents` is None if each
    sequence is one document. `rotary` has the rotary angles, if they are not the angles of all
    positions. `cache` has the keys and values of earlier tokens. `positions` are the positions of
    the sequence that this rank has in matrix products. If the layer is recomputed, `chosen` has the
    experts that the first forward pass has chosen. `factors` has, by name, the factors of the
    routers' losses in the gradient.
    """

    stream: RandomStream | None = None
    documents: Documents | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    cache: KeyValueCache | None = None
    positions: Positions = ALL
    chosen: Chosen | None = None
    factors: Mapping[str, float] = field(default_factory=dict)

    def of_adapters(self, layer: int) -> RandomStream | None:
        """Return the random stream for the dropout of a layer's adapters."""
        if self.stream is None:
            return None
        return self.stream.at(layer, 3)


class Build(NamedTuple):
    """The inputs from which a layer's modules are made, in addition to their row. If `selective` is
    True, the core of attention is recomputed in the backward."""

    model: ModelConfig
    axis: TensorAxis
    layer: int
    selective: bool
    context: ContextAxis
    experts: ExpertAxis = ExpertAxis()


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) over the last dim."""

    def __init__(
        self,
        model: ModelConfig,
        shared_gradient: bool = True,
        size: int | None = None,
        partial_gradient: bool = False,
    ) -> None:
        """Declare the parameters. `size` is the size of the last dim; None means the hidden size.
        `shared_gradient` is True if the input is divided when the sequence is divided, and
        `partial_gradient` if the input is divided when the heads are divided (see
        `Declaration`)."""
        super().__init__()
        self.eps = model.norm_eps
        self.shape = (model.hidden if size is None else size,)
        self.zero_centered = model.zero_centered_norm
        sums = {"shared_gradient": shared_gradient, "partial_gradient": partial_gradient}
        self.weight = declare(1, self.shape, "zeros" if self.zero_centered else "ones", **sums)
        shift = describe.norm_part(model).shift
        self.bias = declare(1, self.shape, "zeros", **sums) if shift else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized activations, which have the shape of x [..., h]."""
        weight: Tensor = self.weight
        if self.zero_centered:  # in float32: half types do not resolve small w in 1 + w
            weight = 1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32))
        if self.bias is None:
            return rms_norm(x, weight, self.eps)
        return F.layer_norm(x, self.shape, weight.to(x.dtype), self.bias, self.eps)


class Heads:
    """The division of [s, b, (a + 2 kv)/t d] into queries, keys and values by head, [b, heads/t, s,
    d] each, for a query heads, kv key heads and t tensor ranks. Queries and keys are normalized and
    rotated if the row requires it."""

    def __init__(self, row: SplitHeads, build: Build, norms: Sequence[Norm]) -> None:
        model, axis = build.model, build.axis
        self.head_size = model.head_size
        self.heads = model.heads // axis.size
        # if there are more ranks than key heads, several ranks have the same key head, each for its
        # own queries
        self.kv_heads = max(1, model.kv_heads // axis.size)
        self.norms = tuple(norms)
        self.rotates = row.rotates
        self.rotary: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return (q, k, v)."""
        qkv = x.unflatten(-1, (-1, self.head_size))  # [s, b, (a + 2 kv) / t, head size]
        rotary = None
        if self.rotates:
            rotary = context.rotary or self.rotary
        if rotary is not None and not self.norms:
            both, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
            q, k = rotate(both, *rotary).split([self.heads, self.kv_heads], dim=2)
        else:
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if self.norms:
            query_norm, key_norm = self.norms
            q = query_norm(q)
            k = key_norm(k)
            if rotary is not None:
                q = rotate(q, *rotary)
                k = rotate(k, *rotary)
        if rotary is not None:
            v = v.clone()  # copy, because a view would keep all of qkv in memory
        # here heads come before positions, because products are computed by head; elsewhere tensors
        # are [s, b, ...]
        return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)


class SelfAttention(Computing):
    """Attention softmax(q k^T) v, causal or bidirectional: [b, heads/t, s, d] -> [s, b, a/t d]."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        model = build.model
        self.layer = build.layer
        self.rate = model.attention_dropout
        # `part` is the number of this rank's part of the heads; `deals` is True if this rank has
        # all positions of its part (Ulysses)
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
        self.attend = AttentionCore(self.scores)
        # ring attention saves no scores, and recomputing it would send all keys again
        self.selective = build.selective and not self.in_ring

    def take(self, kernels: Kernels) -> None:
        """Compute by these kernels from now on."""
        super().take(kernels)
        self.attend = AttentionCore(self.scores, kernels)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Return the concatenated results of the heads, [s, b, a/t d]."""
        if context.cache is not None:
            core = context.cache.attend(q, k, v, layer=self.layer, core=self.attend)
        elif self.selective:
            # the core is cheap to compute, but its tensors are large (Korthikanti et al. 2022,
            # section 5)
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
            # copy the shared heads, because batched products have no groups
            k = k.repeat_interleave(group, dim=1)
            v = v.repeat_interleave(group, dim=1)
        scores = self.kernels.product(q, k.transpose(-1, -2)) * self.scores.scale
        if self.scores.softcap:
            scores = soft_cap(scores, self.scores.softcap)
        hidden = hidden_keys(k, sight)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        # in a half type, a sum of s exponentials would lose the small exponentials
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=wide).to(v.dtype)
        keep = stream.attention_mask(weights.shape, self.rate)
        return self.kernels.product(dropout(weights, keep, self.rate), v)


class Activation(Computing):
    """An activation function such as GELU, or a gated unit (Shazeer 2020, arXiv 2002.05202): [...,
    gates w] -> [..., w]."""

    def __init__(self, row: Activate) -> None:
        super().__init__()
        self.function = row.function
        self.gated = row.gates == 2

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return the activated inputs, [..., w]."""
        if self.gated:
            return gated(x, self.function, self.kernels)
        return gelu(x, self.function, self.kernels)


def drop_hidden(
    x: Tensor, context: Context, rate: float, *, place: tuple[int, ...], axis: TensorAxis
) -> Tensor:
    """Return the activations x [s, b, h], or this rank's positions of them, after dropout. `place`
    has the number of the layer and the number of the mask within the layer."""
    if context.stream is None or rate == 0.0:
        return x
    stream = context.stream.at(*place, positions=axis.between_blocks(context.positions))
    return dropout(x, stream.hidden_mask(x.shape, rate), rate)


# -- rows to modules ------------------------------------------------------------------------------


class RowStep(NamedTuple):
    """A row and the function that computes it. `compute(*inputs, context)` returns the row's
    output, or a tuple of outputs. `last` has the names of the inputs that no later row reads."""

    row: Operator
    compute: Callable[..., Tensor | tuple[Tensor, ...]]
    last: frozenset[str]


def _norm(owner: nn.Module, row: Operator, build: Build) -> Callable[..., Tensor]:
    assert isinstance(row, Normalize)
    norm = Norm(build.model)
    add(owner, row.name, norm)
    return lambda x, context: norm(x)


def _product(owner: nn.Module, row: Operator, build: Build) -> Callable[..., Tensor]:
    assert isinstance(row, Multiply)
    make = built.column_linear if row.is_column else built.row_linear
    linear = make(row.parts(), row.name, build.axis)
    add(owner, row.name, linear)
    return lambda x, context: linear(x, context.of_adapters(build.layer))


def _heads(owner: nn.Module, row: Operator, build: Build) -> Callable[..., tuple[Tensor, ...]]:
    assert isinstance(row, SplitHeads)
    norms = [Norm(build.model, False, part.size, partial_gradient=True) for _, part in row.norms]
    for (name, _), norm in zip(row.norms, norms, strict=True):
        add(owner, name, norm)
    return Heads(row, build, norms)


def _attention(owner: nn.Module, row: Operator, build: Build) -> Callable[..., Tensor]:
    core = SelfAttention(build)
    add(owner, row.name, core)
    return core


def _whole_keys(owner: nn.Module, row: Operator, build: Build) -> Callable[..., tuple[Tensor, ...]]:
    def compute(q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return the queries at this rank's positions, and the keys and values at all positions."""
        if build.context.exchange != "all_gather":
            return q, k, v
        # copy q, because a view would keep this rank's k and v in memory, which the gathered ones
        # replace
        return q.clone(), *build.context.whole_keys(k, v)

    return compute


def _dealt(owner: nn.Module, row: Operator, build: Build) -> Callable[..., tuple[Tensor, ...]]:
    def compute(q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return queries, keys and values at all positions, for this rank's part of the heads."""
        if build.context.exchange != "ulysses":
            return q, k, v
        return part_of_heads(q, k, v, build.context)

    return compute


def _joined(owner: nn.Module, row: Operator, build: Build) -> Callable[..., Tensor]:
    kept = keeps_outputs(build.model, build.selective)

    def compute(y: Tensor, context: Context) -> Tensor:
        """Return the outputs of all heads at this rank's positions."""
        if build.context.exchange != "ulysses":
            return y
        return all_heads(y, build.context, kept=kept)

    return compute


def _activation(owner: nn.Module, row: Operator, build: Build) -> Callable[..., Tensor]:
    assert isinstance(row, Activate)
    function = Activation(row)
    add(owner, row.name, function)
    return function


def _experts(owner: nn.Module, row: Operator, build: Build) -> Callable[..., Tensor]:
    assert isinstance(row, MixExperts)
    router = Router(row)
    add(owner, row.router_name, router)
    mixture = Mixture(row, Routing(build.model), build.axis, build.experts)
    add(owner, row.name, mixture)

    def compute(x: Tensor, *rest: Any) -> Tensor:
        """Return the sum of the experts' outputs. Include the output of the shared experts, if
        there are any."""
        *shared, context = rest
        return sum(shared, mixture(x, router, context.chosen, context.factors))

    return compute


def _residual(owner: nn.Module, row: Operator, build: Build) -> Callable[..., Tensor]:
    assert isinstance(row, AddResidual)
    rate, place = build.model.dropout, (build.layer, row.place)
    return lambda x, y, context: x + drop_hidden(y, context, rate, place=place, axis=build.axis)


def _own(owner: nn.Module, row: Operator, build: Build) -> Callable[..., Tensor]:
    assert isinstance(row, OwnOperator)
    module: nn.Module = row.module(build)
    add(owner, row.name, module)
    return module


Maker = Callable[[nn.Module, Operator, Build], Callable[..., Tensor | tuple[Tensor, ...]]]
# Kind of row -> the function that makes and registers its module. A new kind of operator needs an
# entry here.
MAKERS: Mapping[type[Operator], Maker] = {
    Normalize: _norm,
    Multiply: _product,
    SplitHeads: _heads,
    GatherKeys: _whole_keys,
    DealHeads: _dealt,
    Attend: _attention,
    JoinHeads: _joined,
    Activate: _activation,
    MixExperts: _experts,
    AddResidual: _residual,
}


def maker_of(row: Operator) -> Maker:
    """Return the function that makes and registers the module of the operator that `row` describes.
    If the row belongs to the user's own sublayer, the row itself makes the module."""
    return _own if isinstance(row, OwnOperator) else MAKERS[type(row)]


def add(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Register `module` in `owner` under a dotted name, such as "attention.qkv"."""
    path, _, leaf = name.rpartition(".")
    for part in filter(None, path.split(".")):
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    owner.add_module(leaf, module)


def install(owner: nn.Module, rows: Sequence[Operator], build: Build) -> tuple[RowStep, ...]:
    """Make the modules of `rows`, registered in `owner`, and return the steps to `run`."""
    steps = []
    for number, row in enumerate(rows):
        last = frozenset(name for name in row.inputs if not _read_after(rows[number + 1 :], name))
        steps.append(RowStep(row, maker_of(row)(owner, row, build), last))
    return tuple(steps)


def _read_after(rows: Sequence[Operator], name: str) -> bool:
    """Return True if one of `rows` reads a value before any of them writes it."""
    for row in rows:
        if name in row.inputs:
            return True
        if name in row.outputs:
            return False
    return False


def run(steps: Sequence[RowStep], values: dict[str, Tensor], context: Context) -> dict[str, Tensor]:
    """Compute rows in order from named values. Return the values that no row has consumed.

    A value is freed after the last row that reads it.
    """
    for row, compute, last in steps:
        inputs = [values.pop(name) if name in last else values[name] for name in row.inputs]
        outputs = compute(*inputs, context)
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        values.update(zip(row.outputs, outputs, strict=True))
    return values
