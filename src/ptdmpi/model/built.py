"""Modules from the one table of parameters (`plan.shape.parameters`): what the planner counts is
what the model is built from."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from ptdmpi.config import ModelConfig
from ptdmpi.model.adapters.low_rank import LowRankAdapter
from ptdmpi.model.adapters.scales import ScaleAdapter
from ptdmpi.model.parameters import Parameter, Split
from ptdmpi.model.tables import Table, VocabularyEmbedding
from ptdmpi.model.tensor_parallel import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    TensorAxis,
    VocabularyHead,
)
from ptdmpi.plan.layer.low_bit import LowBit
from ptdmpi.plan.layer.parts import Linear, LowRankPair, Part, Parts, Scale, as_linear, as_table
from ptdmpi.plan.shape import parameters


def column_linear(parts: Parts, name: str, axis: TensorAxis) -> ColumnParallelLinear:
    """A linear whose outputs are divided, with its adapters; raises TypeError for another part, as
    all do here."""
    linear = as_linear(parts[name], "columns")
    module = ColumnParallelLinear(
        axis, linear.inputs, linear.outputs, linear.bias, linear.init_std, linear.most
    )
    sizes = Split(0, linear.outputs, linear.most).local_sizes(axis.size)
    ends = (0, *itertools.accumulate(sizes))
    _adapt(module, parts, name, [slice(*pair) for pair in itertools.pairwise(ends)])
    return module


def row_linear(parts: Parts, name: str, axis: TensorAxis) -> RowParallelLinear:
    """A linear whose inputs are divided, with its adapters."""
    linear = as_linear(parts[name], "rows")
    outputs = sum(linear.outputs)
    module = RowParallelLinear(axis, linear.inputs, outputs, linear.bias, linear.init_std)
    _adapt(module, parts, name, [slice(None)])
    return module


def _adapt(
    module: ColumnParallelLinear | RowParallelLinear,
    parts: Parts,
    name: str,
    columns: Sequence[slice],
) -> None:
    """Put beside a linear what the rows below its name say; `columns` are those of its outputs."""
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
    """A linear that every tensor rank has whole."""
    linear = as_linear(part, None)
    return ReplicatedLinear(linear.inputs, sum(linear.outputs), linear.bias, linear.init_std)


def table(part: Part) -> Table:
    """A table that every tensor rank has whole."""
    described = as_table(part, split=False)
    return Table(described.rows, described.hidden, described.init_std)


def word_embedding(part: Part, axis: TensorAxis) -> VocabularyEmbedding:
    """The vocabulary's table, its rows divided."""
    described = as_table(part, split=True)
    return VocabularyEmbedding(axis, described.rows, described.hidden, described.init_std)


def output_head(part: Part, axis: TensorAxis, softcap: float) -> VocabularyHead:
    """The linear to the vocabulary's logits, capped where `softcap` is not 0."""
    linear = as_linear(part, "columns")
    (vocab_size,) = linear.outputs
    sizes = (vocab_size, linear.inputs, linear.init_std)
    return VocabularyHead(axis, *sizes, linear.bias, softcap)


def declare_as_described(
    stage: nn.Module, model: ModelConfig, vocab_size: int, layers: range
) -> None:
    """Declare of a stage's parameters what the table says besides their shapes: which do not train,
    and which products take in few bits (the weights of the layers' linears)."""
    for prefix, parts in _described(model, vocab_size, layers):
        for name, part in parts.items():
            if not part.trains:
                for weight in _declared(stage.get_submodule(prefix + name)):
                    weight.declaration = replace(weight.declaration, trains=False)
    form = LowBit.of(model.quantize)
    for number in layers:
        for name, part in parameters.layer(model).items():
            if isinstance(part, Linear):
                linear = stage.get_submodule(f"layers.{number}.{name}")
                weight = next(_declared(linear))
                weight.declaration = replace(weight.declaration, low_bit=form)


def _described(model: ModelConfig, vocab_size: int, layers: range) -> Iterator[tuple[str, Parts]]:
    """The tables of a stage with these layers, each with what the names in it begin with."""
    for number in layers:
        yield f"layers.{number}.", parameters.layer(model, number)
    if layers.start == 0:
        yield "embedding.", parameters.embedding(model, vocab_size)
    if layers.stop == model.layers:
        yield "", parameters.head(model, vocab_size)


def _declared(module: nn.Module) -> Iterator[Parameter]:
    """The parameters of a module itself, the weight first."""
    for name, weight in module.named_parameters(recurse=False):
        assert isinstance(weight, Parameter), f"{name} is not declared"
        yield weight
