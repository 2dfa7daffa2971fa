"""The adapters for a matrix product that computes only some outputs of a linear layer. Such a
product applies only the adapters of these outputs."""

from collections.abc import Sequence
from copy import copy
from typing import TypeVar

from ptdmpi.model.adapters.low_rank import LowRankAdapter
from ptdmpi.model.adapters.scales import ScaleAdapter

Adapter = TypeVar("Adapter", LowRankAdapter, ScaleAdapter)


def of_columns(adapters: Sequence[Adapter], columns: slice) -> list[Adapter]:
    """Return the adapters that change the outputs `columns` of a linear layer, for a matrix product
    that computes only these outputs. The returned adapters are copies with the same parameters. The
    first column of the product's result is output `columns.start` of the layer, so the copies count
    columns from this output."""
    here = [each for each in adapters if columns.start <= each.columns.start < columns.stop]
    return [_moved(each, columns.start) for each in here]


def _moved(adapter: Adapter, first: int) -> Adapter:
    """Return a copy of `adapter` with the same parameters. The copy counts the columns of the
    linear layer from `first`: it subtracts `first` from the numbers of its columns."""
    moved = copy(adapter)
    moved.columns = slice(adapter.columns.start - first, adapter.columns.stop - first)
    return moved
