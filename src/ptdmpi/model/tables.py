"""Lookup tables for embeddings. Every tensor rank has a complete table, or, for a vocabulary, the
rows of the table are divided over the tensor axis (Shoeybi et al. 2019, arXiv 1909.08053, section
3)."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ptdmpi.model.parameters import Parameter, Split, declare
from ptdmpi.model.tensor_parallel import TensorAxis


class _Look(Function):
    """The look-up of rows in a table, as an autograd Function. The backward adds the gradients of
    the looked-up rows to the table's gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, table: Parameter) -> Tensor:
        ctx.rows = rows
        ctx.table = table
        return F.embedding(rows, table)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None]:
        rows = ctx.rows
        ctx.table.accumulate(lambda total: _add_rows(total, rows, dy))
        return None, None


def _add_rows(total: Tensor, rows: Tensor, dy: Tensor) -> None:
    """Add dy [..., hidden] to some rows of `total`, the gradient of a table. `rows` [...] has the
    numbers of these rows."""
    dy = dy.reshape(-1, dy.shape[-1]).to(total.dtype)
    total.index_add_(0, rows.reshape(-1), dy)


class Table(nn.Module):
    """A table whose full weight is on every tensor rank. Its inputs are row numbers [...], and its
    outputs the rows [..., hidden]. Each rank looks up rows only for its own positions."""

    def __init__(self, rows: int, hidden: int, init_std: float) -> None:
        super().__init__()
        self.weight = declare(1, (rows, hidden), init_std, shared_gradient=True)

    def first(self, count: int) -> Tensor:
        """Return the first `count` rows of the table, [count, hidden]."""
        return self.weight[:count]

    def forward(self, rows: Tensor) -> Tensor:
        """Return the rows [..., hidden] of the table that have the numbers `rows` [...]."""
        return _Look.apply(rows, self.weight)


class _Embed(Function):
    """The look-up in a table whose rows are divided over the tensor axis: each rank looks up the
    rows that it has, and the results of all ranks are summed."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Parameter, axis: TensorAxis) -> Tensor:
        if axis.size == 1:
            ctx.layer = (weight, axis, ids, None)
            return F.embedding(ids, weight)
        rows = weight.shape[0]
        local = ids - axis.rank * rows
        # if another rank has the row of an id, this rank contributes zeros to the sum over ranks:
        # it looks up row 0, and sets the values to zero
        elsewhere = (local < 0) | (local >= rows)
        local = local.masked_fill(elsewhere, 0)
        ctx.layer = (weight, axis, local, elsewhere)
        partial = F.embedding(local, weight).masked_fill_(elsewhere[..., None], 0.0)
        return axis.reduce(partial)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None]:
        weight, axis, local, elsewhere = ctx.layer

        def add(total: Tensor) -> None:
            """Add the gradients of the table's rows that this rank has, summed over all positions,
            to `total`."""
            whole = axis.gather(dy)
            if elsewhere is not None:
                whole = whole.masked_fill(elsewhere[..., None], 0.0)
            _add_rows(total, local, whole)

        weight.accumulate(add)
        return None, None, None


def look_up(ids: Tensor, weight: Parameter, axis: TensorAxis) -> Tensor:
    """Return the rows `ids` [s, b] of a vocabulary's table, [s, b, hidden]; under sequence
    parallelism, only at this rank's positions. `weight` has this tensor rank's rows of the
    table."""
    return _Embed.apply(ids, weight, axis)


class VocabularyEmbedding(nn.Module):
    """An embedding of token ids, [s, b] -> [s, b, hidden]. The rows of the embedding's table are
    divided over the tensor axis."""

    def __init__(self, axis: TensorAxis, vocab_size: int, hidden: int, init_std: float) -> None:
        super().__init__()
        self.axis = axis
        self.weight = declare(
            axis.size, (vocab_size, hidden), init_std, split=Split(0, (vocab_size,))
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of `ids`; under sequence parallelism, only at this rank's
        positions."""
        return look_up(ids, self.weight, self.axis)
