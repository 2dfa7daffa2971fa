"""Functions that build modules from the descriptions of their parameters in
`plan.shape.parameters`; the planner counts parameters by the same descriptions. Each of these
functions raises TypeError if it gets the description of another kind of module."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ptdmpi.base.errors import InputError
from ptdmpi.base.plugins import users_code
from ptdmpi.comm.communicator import OneRank
from ptdmpi.config import ModelConfig
from ptdmpi.model.adapters.low_rank import LowRankAdapter
from ptdmpi.model.adapters.scales import ScaleAdapter
from ptdmpi.model.output.vocabulary import VocabularyHead
from ptdmpi.model.parameters import Parameter, Split
from ptdmpi.model.tables import Table, VocabularyEmbedding
from ptdmpi.model.tensor_parallel import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    TensorAxis,
)
from ptdmpi.plan.layer.fitting import local_width
from ptdmpi.plan.layer.low_bit import LowBit
from ptdmpi.plan.layer.operator import Operator, OwnOperator
from ptdmpi.plan.layer.parts import Linear, LowRankPair, Part, Parts, Scale, as_linear, as_table
from ptdmpi.plan.layer.products import Multiply
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.parameters import is_of_expert


def linear(parts: Parts, name: str, axis: TensorAxis) -> ColumnParallelLinear | RowParallelLinear:
    """Return the linear layer that `parts[name]` describes, with its adapters. Raise TypeError if
    `parts[name]` does not describe a linear layer."""
    part = parts[name]
    if isinstance(part, Linear) and part.split is None:
        return whole_linear(parts, name)
    if isinstance(part, Linear) and part.split == "rows":
        return row_linear(parts, name, axis)
    return column_linear(parts, name, axis)


@dataclass(frozen=True)
class Product:
    """The function that computes a linear with its adapters. The linear is in the transformer layer
    number `layer`, which determines the dropout masks of the adapters."""

    linear: ColumnParallelLinear | RowParallelLinear
    layer: int

    def __call__(self, x: Tensor, context: Any, **options: bool) -> Tensor:
        """Return the outputs for the inputs x. `options` are the keyword arguments of the linear's
        `forward`."""
        outputs: Tensor = self.linear(x, context.of_adapters(self.layer), **options)
        return outputs


def added_linear(
    owner: nn.Module, row: Multiply, axis: TensorAxis
) -> ColumnParallelLinear | RowParallelLinear:
    """Make the linear layer of `row` (the description of a linear layer), register it in `owner`
    under the row's name, and return it."""
    module = linear(row.parts(), row.name, axis)
    module.keeps_codes = row.keeps_codes
    module.scaling = row.scaling
    add(owner, row.name, module)
    return module


def add(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Register `module` in `owner` under a dotted name, such as "attention.qkv". Raise InputError
    if a part of the name is the name of another attribute, such as "training"."""
    path, _, leaf = name.rpartition(".")
    for part in filter(None, path.split(".")):
        if part not in dict(owner.named_children()):
            _require_free(owner, part, name)
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    _require_free(owner, leaf, name)
    owner.add_module(leaf, module)


def _require_free(owner: nn.Module, part: str, name: str) -> None:
    """Raise InputError if `owner` has an attribute that is called like `part` of an operator's
    name."""
    if hasattr(owner, part):
        raise InputError(
            f"model.sublayers: {name}: the module already has an attribute {part}; legal: another "
            "name"
        )


def column_linear(parts: Parts, name: str, axis: TensorAxis) -> ColumnParallelLinear:
    """Return the linear layer that `parts[name]` describes, with its adapters. Its outputs are
    divided over the tensor axis. Raise TypeError if `parts[name]` does not describe a linear layer
    whose outputs are divided."""
    linear = as_linear(parts[name], "columns")
    module = ColumnParallelLinear(
        axis,
        linear.inputs,
        linear.outputs,
        bias=linear.bias,
        init_std=linear.init_std,
        most=linear.most,
    )
    sizes = Split(0, linear.outputs, linear.most).local_sizes(axis.size)
    ends = (0, *itertools.accumulate(sizes))
    _adapt(module, parts, name, [slice(*pair) for pair in itertools.pairwise(ends)])
    return module


def row_linear(parts: Parts, name: str, axis: TensorAxis) -> RowParallelLinear:
    """Return the linear layer that `parts[name]` describes, with its adapters. Its inputs are
    divided over the tensor axis."""
    linear = as_linear(parts[name], "rows")
    outputs = sum(linear.outputs)
    module = RowParallelLinear(
        axis, linear.inputs, outputs, bias=linear.bias, init_std=linear.init_std
    )
    _adapt(module, parts, name, [slice(None)])
    return module


def whole_linear(parts: Parts, name: str) -> ColumnParallelLinear:
    """Return the linear layer that `parts[name]` describes. Its full weight is on every tensor
    rank. Under sequence parallelism, a rank applies the layer only to its own part of the sequence;
    otherwise, to all positions that the rank has."""
    linear = as_linear(parts[name], None)
    module = ColumnParallelLinear(
        TensorAxis(OneRank()),
        linear.inputs,
        linear.outputs,
        bias=linear.bias,
        init_std=linear.init_std,
    )
    for weight in _declared(module):
        weight.declaration = replace(
            weight.declaration, split=None, parts=linear.outputs, shared_gradient=True
        )
    return module


def _adapt(
    module: ColumnParallelLinear | RowParallelLinear,
    parts: Parts,
    name: str,
    columns: Sequence[slice],
) -> None:
    """Attach adapters to the linear `module`, which has the name `name`. The dict `parts` describes
    the adapters. A linear may have several parts, such as query, key and value. `columns` has one
    slice for each part: the outputs of this part on this rank."""
    axis = module.axis
    pairs = list[LowRankAdapter]()
    scales = list[ScaleAdapter]()
    for row, part in parts.items():
        place, _, leaf = row.rpartition(".")
        if place == name and isinstance(part, LowRankPair):
            pairs.append(LowRankAdapter(part, (axis.rank, axis.size), columns[part.output]))
            module.add_module(leaf, pairs[-1])
        elif place == name and isinstance(part, Scale):
            scales.append(ScaleAdapter(part, axis.size, columns[part.output]))
            module.add_module(leaf, scales[-1])
    module.adapters = pairs
    module.scales = scales


def replicated_linear(part: Part) -> ReplicatedLinear:
    """Return the linear layer that `part` describes. Its full weight is on every tensor rank."""
    linear = as_linear(part, None)
    return ReplicatedLinear(linear.inputs, sum(linear.outputs), linear.bias, linear.init_std)


def table(part: Part) -> Table:
    """Return the embedding table that `part` describes. The full table is on every tensor rank."""
    described = as_table(part, split=False)
    return Table(described.rows, described.hidden, described.init_std)


def word_embedding(part: Part, axis: TensorAxis) -> VocabularyEmbedding:
    """Return the embedding of the vocabulary that `part` describes. The rows of its table are
    divided over the tensor axis."""
    described = as_table(part, split=True)
    return VocabularyEmbedding(axis, described.rows, described.hidden, described.init_std)


def output_head(part: Part, axis: TensorAxis, softcap: float) -> VocabularyHead:
    """Return the linear layer that computes the logits of the vocabulary, which `part` describes.
    The logits are capped if `softcap` is not 0."""
    linear = as_linear(part, "columns")
    (vocab_size,) = linear.outputs
    return VocabularyHead(
        axis,
        vocab_size,
        linear.inputs,
        init_std=linear.init_std,
        bias=linear.bias,
        softcap=softcap,
    )


def declare_as_described(
    stage: nn.Module, model: ModelConfig, vocab_size: int, layers: range
) -> None:
    """In the declaration of each parameter of a stage, set whether the parameter trains (`trains`)
    and the parameter's quantized format (`low_bit`). Both properties are determined by the
    descriptions in `plan.shape.parameters`. Only the weights of the layers' linears may be
    quantized."""
    modules = dict(stage.named_modules())
    for prefix, parts in _described(model, vocab_size, layers):
        for name, part in parts.items():
            # skip an expert whose module is on another rank
            if not part.trains and not (is_of_expert(name) and prefix + name not in modules):
                for weight in _declared(modules[prefix + name]):
                    weight.declaration = replace(weight.declaration, trains=False)
    form = LowBit.of(model.quantize)
    if form is None:
        return
    for number in layers:
        for name, part in parameters.layer(model, model.kind_of(number)).items():
            if isinstance(part, Linear):
                linear = stage.get_submodule(f"layers.{number}.{name}")
                weight = next(_declared(linear))
                weight.declaration = replace(weight.declaration, low_bit=form)


def _described(model: ModelConfig, vocab_size: int, layers: range) -> Iterator[tuple[str, Parts]]:
    """Yield (prefix, descriptions) for each layer in `layers`, and for the embedding and the head
    if they are on the same pipeline stage as these layers. All parameters in `descriptions` have
    names with this prefix."""
    for number in layers:
        yield f"layers.{number}.", parameters.layer(model, model.kind_of(number))
    if layers.start == 0:
        yield "embedding.", parameters.embedding(model, vocab_size)
    if layers.stop == model.layers:
        yield "", parameters.head(model, vocab_size)


def _declared(module: nn.Module) -> Iterator[Parameter]:
    """Yield the module's own parameters, without the parameters of its submodules. The first one is
    the module's weight."""
    for name, weight in module.named_parameters(recurse=False):
        assert isinstance(weight, Parameter), f"{name} is not declared"
        yield weight


def require_parts(owner: nn.Module, row: Operator, module: nn.Module, tensor: int) -> None:
    """Raise InputError unless `row.parts()` describes the parameters of `module`. `row` is the
    description of the operator that `module` computes, and `tensor` is the number of tensor ranks.
    The planner and the optimizer read `row.parts()`, not the module, so `row.parts()` and the
    module must agree."""
    mistake = f"sublayer operator {row.name}: its parts() and its module differ: "
    described = {f"{row.name}.{name}" if name else row.name for name, _ in module.named_modules()}
    for name, part in row.parts().items():
        weights = []
        if name in described:
            weights = list(owner.get_submodule(name).parameters(recurse=False))
        sizes = [weight.numel() for weight in weights]
        expected = list(part.weights(tensor))
        if sizes != expected:
            raise InputError(
                f"{mistake}{name} has {expected} elements by parts(), and {sizes} in the module"
            )
        if not isinstance(part, Linear) and any(weight.dim() > 1 for weight in weights):
            raise InputError(
                f"{mistake}{name} is no linear, and its parameter has {weights[0].dim()} dims; "
                "legal: a Linear, or parameters of one dim"
            )
    others = sum(weight.numel() for weight in module.parameters())
    others -= sum(sum(part.weights(tensor)) for part in row.parts().values())
    if others:
        raise InputError(f"{mistake}the module has {others} more elements than parts() says")


def own(owner: nn.Module, row: Operator, build: Any) -> Callable[..., Any]:
    """Return the module of an operator that a user has written, after registering it in `owner`.
    Raise InputError if the user's code does not return a module, or if the module's parameters are
    not the parameters that `row` describes."""
    where = f"sublayer operator {row.name}"
    if not isinstance(row, OwnOperator):
        raise InputError(
            f"{where} is of the type {type(row).__name__}, which makes no module; legal: a class "
            "that is derived from OwnOperator"
        )
    try:
        with users_code(where):
            module = row.module(build)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    if not isinstance(module, nn.Module):
        raise InputError(
            f"{where}: module() returned {type(module).__name__}; legal: a torch.nn.Module"
        )
    for name, weight in module.named_parameters():
        if not isinstance(weight, Parameter):
            raise InputError(
                f"{where}: the parameter {name} is a {type(weight).__name__}; legal: a result of "
                "ptdmpi.model.parameters.declare"
            )
    add(owner, row.name, module)
    require_parts(owner, row, module, build.axis.size)
    return module


def checked(
    compute: Callable[..., Any],
    row: Operator,
    later: Sequence[Operator],
    *,
    owner: nn.Module,
    build: Any,
) -> Callable[..., Any]:
    """Return a function that calls `compute`, the function of an operator that a user has written,
    and checks the outputs. The returned function raises InputError if the operators `later`, which
    follow this operator, cannot read the outputs. It also raises InputError if the user's code
    tries to end the program, for example by `sys.exit`."""
    where = f"sublayer operator {row.name}"
    widths = [
        local_width(later, name, hidden=build.model.hidden, tensor=build.axis.size)
        for name in row.outputs
    ]

    def outputs_of(*inputs: Any) -> Any:
        """Return the outputs of the operator, after checking them."""
        if torch.compiler.is_compiling():
            outputs = compute(*inputs)
        else:
            with users_code(where):
                outputs = compute(*inputs)
        values = (outputs,) if isinstance(outputs, Tensor) else outputs
        known = isinstance(values, tuple) and all(isinstance(x, Tensor) for x in values)
        if not known or len(values) != len(widths):
            raise InputError(f"{where} must return {len(widths)} tensors, in a tuple if several")
        batch, computes = inputs[0].shape[1], _compute_type(owner)
        for name, value, width in zip(row.outputs, values, widths, strict=True):
            if width is None:
                continue
            if value.dim() != 3 or value.shape[1:] != (batch, width) or value.dtype != computes:
                raise InputError(
                    f"{where} returned {name!r} of shape {list(value.shape)} and {value.dtype}; "
                    f"legal: [positions, {batch}, {width}] and {computes}"
                )
        return outputs

    return outputs_of


def _compute_type(owner: nn.Module) -> torch.dtype:
    """Return the type in which the layer `owner` computes: the type of its weights that are not
    quantized, such as those of its norms."""
    return next(weight.dtype for weight in owner.parameters() if weight.is_floating_point())
