"""The selection of adapters for a product that computes only some outputs of a linear."""

from collections.abc import Sequence
from copy import copy
from typing import TypeVar

from ptdmpi.model.adapters.low_rank import LowRankAdapter
from ptdmpi.model.adapters.scales import ScaleAdapter

Adapter = TypeVar("Adapter", LowRankAdapter, ScaleAdapter)


def of_columns(adapters: Sequence[Adapter], columns: slice) -> list[Adapter]:
    """Return the adapters for the outputs `columns` of a linear, for a product that computes only
    these outputs. The returned adapters share the parameters of the given ones, but their column
    numbers count from the first of these outputs."""
    here = [each for each in adapters if columns.start <= each.columns.start < columns.stop]
    return [_moved(each, columns.start) for each in here]


def _moved(adapter: Adapter, first: int) -> Adapter:
    """Return an adapter with the same parameters, for outputs whose first column is `first`."""
    moved = copy(adapter)
    moved.columns = slice(adapter.columns.start - first, adapter.columns.stop - first)
    return moved
