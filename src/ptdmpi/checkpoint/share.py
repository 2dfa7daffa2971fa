"""The part of a checkpoint that each rank writes: ranks that have the same state write equal shares
of it."""

import math
from collections.abc import Iterator, Sequence

from ptdmpi.comm.world import Axes
from ptdmpi.model.state import Piece, State

# Slices up to this size are written by one rank; larger ones may be divided between ranks.
WHOLE_BYTES = 1 << 16


def share(state: State, axes: Axes, mean: bool = False) -> Iterator[Piece]:
    """Yield the pieces that this rank writes, so that exactly one rank writes each element of each
    tensor. With `mean`, the mean of replicas that differ is written under one name; otherwise each
    replica is written."""
    grid, rank = axes.grid, axes.world.rank
    owned = [piece for piece in state.pieces(mean) if piece.owned]
    # sort the pieces: those that the fewest ranks have come first
    ways = sorted({piece.cut_by for piece in owned})
    for cut_by in sorted(ways, key=len, reverse=True):
        pieces = [piece for piece in owned if piece.cut_by == cut_by]
        alike = grid.group(rank, *(axis for axis in grid.axes if axis not in cut_by))
        shapes = [piece.box.size for piece in pieces]
        element_bytes = pieces[0].values.element_size()
        for number, rows in divide(shapes, element_bytes, len(alike), alike.index(rank)):
            yield pieces[number].rows(rows.start, rows.stop)


def divide(
    shapes: Sequence[tuple[int, ...]], element_bytes: int, holders: int, place: int
) -> Iterator[tuple[int, slice]]:
    """Yield (number of the slice, rows) for the part that rank `place` of `holders` writes.
    `shapes` are the shapes of slices that all these ranks have.

    Imagine all slices one after the other on a line of bytes, which is cut into equal sections, one
    for each rank. A row of dim 0, or a small slice that is not cut, belongs to the rank in whose
    section it begins.
    """
    total = sum(math.prod(shape) for shape in shapes) * element_bytes
    begin, end = (total * k // holders for k in (place, place + 1))
    offset = 0
    for number, shape in enumerate(shapes):
        size = math.prod(shape) * element_bytes
        units = shape[0] if size > WHOLE_BYTES else 1
        # -(-a // b) rounds up: the first row or slice that begins at the cut or after it
        first, last = (min(units, max(0, -((offset - at) * units // size))) for at in (begin, end))
        if first < last:
            yield number, slice(0, shape[0]) if units == 1 else slice(first, last)
        offset += size
