"""Modules from the one table of parameters (`plan.shape.parameters`): what the planner counts is
what the model is built from."""

from ptdmpi.model.tensor_parallel import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    Table,
    TensorAxis,
    VocabularyEmbedding,
    VocabularyHead,
)
from ptdmpi.plan.shape.parameters import Part, as_linear, as_table


def column_linear(part: Part, axis: TensorAxis) -> ColumnParallelLinear:
    """A linear whose outputs are divided; raises TypeError for another part, as all do here."""
    linear = as_linear(part, "columns")
    return ColumnParallelLinear(
        axis, linear.inputs, linear.outputs, linear.bias, linear.init_std, linear.most
    )


def row_linear(part: Part, axis: TensorAxis) -> RowParallelLinear:
    """A linear whose inputs are divided."""
    linear = as_linear(part, "rows")
    outputs = sum(linear.outputs)
    return RowParallelLinear(axis, linear.inputs, outputs, linear.bias, linear.init_std)


def replicated_linear(part: Part) -> ReplicatedLinear:
    """A linear that every tensor rank has whole."""
    linear = as_linear(part, None)
    return ReplicatedLinear(linear.inputs, sum(linear.outputs), linear.bias, linear.init_std)


def table(part: Part) -> Table:
    """A table that every tensor rank has whole."""
    found = as_table(part, split=False)
    return Table(found.rows, found.hidden, found.init_std)


def word_embedding(part: Part, axis: TensorAxis) -> VocabularyEmbedding:
    """The vocabulary's table, its rows divided."""
    found = as_table(part, split=True)
    return VocabularyEmbedding(axis, found.rows, found.hidden, found.init_std)


def output_head(part: Part, axis: TensorAxis, softcap: float) -> VocabularyHead:
    """The linear to the vocabulary's logits, capped where `softcap` is not 0."""
    linear = as_linear(part, "columns")
    (vocab_size,) = linear.outputs
    sizes = (vocab_size, linear.inputs, linear.init_std)
    return VocabularyHead(axis, *sizes, linear.bias, softcap)
