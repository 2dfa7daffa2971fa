"""A function that selects the adapters of a linear layer for a matrix product that computes only
some outputs of the layer."""

from collections.abc import Sequence
from copy import copy
from typing import TypeVar

from ptdmpi.model.adapters.low_rank import LowRankAdapter
from ptdmpi.model.adapters.scales import ScaleAdapter

Adapter = TypeVar("Adapter", LowRankAdapter, ScaleAdapter)


def of_columns(adapters: Sequence[Adapter], columns: slice) -> list[Adapter]:
    """Return those of `adapters` that change the outputs `columns` of a linear layer, for a product
    that computes only these outputs. The returned adapters are copies with the same parameters.
    Their column numbers count from `columns.start`."""
    here = [each for each in adapters if columns.start <= each.columns.start < columns.stop]
    return [_moved(each, columns.start) for each in here]


def _moved(adapter: Adapter, first: int) -> Adapter:
    """Return a copy of `adapter` with the same parameters, whose column numbers count from the
    column `first` of the linear layer."""
    moved = copy(adapter)
    moved.columns = slice(adapter.columns.start - first, adapter.columns.stop - first)
    return moved
