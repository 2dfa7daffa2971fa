"""The division of a checkpoint among ranks: ranks that have the same state write equal parts of
this state."""

import math
from collections.abc import Iterator, Sequence

from ptdmpi.comm.world import Axes
from ptdmpi.model.state import Piece, State

# A slice of at most this number of bytes is not cut: one rank writes the whole slice. Larger slices
# may be divided among ranks.
WHOLE_BYTES = 1 << 16


def share(state: State, axes: Axes, mean: bool = False) -> Iterator[Piece]:
    """Yield the slices of the state that this rank writes. Each element of each tensor is written
    by exactly one rank. If replicas differ and `mean` is True, the mean of the replicas is written.
    If replicas differ and `mean` is False, each replica is written under a separate name."""
    grid, rank = axes.grid, axes.world.rank
    owned = [piece for piece in state.pieces(mean) if piece.owned]
    # every save has the same order: first the slices that the fewest ranks have
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
    """Divide slices among `holders` ranks that all have copies of these slices. `place` is the
    number of this rank among these ranks, from 0. Yield (number of a slice, range of its rows) for
    all rows that this rank writes. `shapes` has the shapes of the slices.

    The bytes of all slices, one slice after the other, form one sequence. The sequence is cut into
    `holders` equal sections, one for each rank. A rank writes each row (index of dim 0) that begins
    in its section. A slice of at most WHOLE_BYTES is not cut: the rank in whose section the slice
    begins writes the whole slice.
    """
    total = sum(math.prod(shape) for shape in shapes) * element_bytes
    begin, end = (total * k // holders for k in (place, place + 1))
    offset = 0
    for number, shape in enumerate(shapes):
        size = math.prod(shape) * element_bytes
        units = shape[0] if size > WHOLE_BYTES else 1
        # Compute the first rows that begin at or after the two ends of this rank's section. Here
        # -(-a // b) divides and rounds up. A slice that is not cut counts as a single row.
        first, last = (min(units, max(0, -((offset - at) * units // size))) for at in (begin, end))
        if first < last:
            yield number, slice(0, shape[0]) if units == 1 else slice(first, last)
        offset += size
