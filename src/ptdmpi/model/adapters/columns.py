"""The selection of the adapters for a matrix product that computes only some outputs of a linear
layer. Only the adapters of these outputs are applied."""

from collections.abc import Sequence
from copy import copy
from typing import TypeVar

from ptdmpi.model.adapters.low_rank import LowRankAdapter
from ptdmpi.model.adapters.scales import ScaleAdapter

Adapter = TypeVar("Adapter", LowRankAdapter, ScaleAdapter)


def of_columns(adapters: Sequence[Adapter], columns: slice) -> list[Adapter]:
    """Return the adapters that change the outputs `columns` of a linear layer. The returned
    adapters are applied to the result of a product that computes only these outputs. The returned
    adapters are copies with the same parameters. The product computes the outputs of the layer from
    `columns.start` on, so the copies count outputs from there: output `columns.start` has the
    number 0."""
    here = [each for each in adapters if columns.start <= each.columns.start < columns.stop]
    return [_moved(each, columns.start) for each in here]


def _moved(adapter: Adapter, first: int) -> Adapter:
    """Return a copy of `adapter` with the same parameters. In the copy, column `first` of the
    linear layer has the number 0."""
    moved = copy(adapter)
    moved.columns = slice(adapter.columns.start - first, adapter.columns.stop - first)
    return moved
