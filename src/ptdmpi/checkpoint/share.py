"""Who writes what: a rank's part of the state, in even shares over the ranks that hold the same."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ptdmpi.checkpoint.boxes import Slices
from ptdmpi.model.parameters import Box, Entry
from ptdmpi.plan.layout.grid import CUTTING

if TYPE_CHECKING:
    from ptdmpi.train.engine import Engine

# What is kept of each parameter: its float32 (float64) master and Adam's two moments.
KINDS = ("weights", "exp_avg", "exp_avg_sq")
# Boxes up to this size are written by one rank, greater ones may be cut between two.
WHOLE_BYTES = 1 << 16


@dataclass(frozen=True)
class Part:
    """A box of one tensor that this rank writes."""

    kind: str
    entry: Entry
    box: Box

    @property
    def elements(self) -> int:
        return math.prod(_size(self.box.logical))


def tensor_of(engine: "Engine", kind: str, entry: Entry) -> Tensor:
    """The master or a moment of one parameter: a view in its local shape."""
    if kind == "weights":
        return entry.view(engine.buffer.master)
    return engine.optimizer.moment(kind, entry)


def share(engine: "Engine") -> Iterator[Part]:
    """What this rank writes, so that every element of every tensor is written once."""
    axes, differs = engine.axes, set(engine.policy.differs)
    if any(axes.coordinates[axis] for axis in differs):
        return  # of replicas that differ the first one is saved
    tensor, grid = axes["tensor"], axes.grid
    counted = set(engine.reduction.counted)
    entries = [entry for name, entry in engine.buffer.entries.items() if name in counted]
    for replicated in (False, True):
        parts = [
            Part(kind, entry, box)
            for entry in entries
            if (entry.declaration.split is None) == replicated
            for kind in KINDS
            for box in entry.declaration.boxes(tensor.rank, tensor.size)
            if box.counts
        ]
        # the ranks that hold the same of these are those that differ on no other axis
        cuts = differs | ({"pipeline"} if replicated else set(CUTTING))
        alike = grid.group(axes.world.rank, *(axis for axis in grid.axes if axis not in cuts))
        holders, place = len(alike), alike.index(axes.world.rank)
        shapes = [_size(part.box.logical) for part in parts]
        for number, rows in divide(shapes, engine.buffer.master.element_size(), holders, place):
            part = parts[number]
            yield Part(part.kind, part.entry, _rows_of(part.box, rows))


def divide(
    shapes: Sequence[tuple[int, ...]], element_bytes: int, holders: int, place: int
) -> Iterator[tuple[int, slice]]:
    """What the rank at `place` of `holders` writes of boxes that all of them hold: (number, rows).

    The boxes stand one after the other on a line of bytes that is cut into equal lengths; a row of
    dim 0, or a whole small box, goes to the rank in whose length it begins.
    """
    total = sum(math.prod(shape) for shape in shapes) * element_bytes
    begin, end = (total * k // holders for k in (place, place + 1))
    offset = 0
    for number, shape in enumerate(shapes):
        size = math.prod(shape) * element_bytes
        units = shape[0] if size > WHOLE_BYTES else 1
        first, last = (min(units, max(0, -((offset - at) * units // size))) for at in (begin, end))
        if first < last:
            yield number, slice(0, shape[0]) if units == 1 else slice(first, last)
        offset += size


def _rows_of(box: Box, rows: slice) -> Box:
    """The given rows of dim 0 of a box, counted from its first."""

    def cut(whole: Slices) -> Slices:
        start = whole[0].start
        return (slice(start + rows.start, start + rows.stop), *whole[1:])

    return Box(cut(box.logical), cut(box.local))


def _size(box: Slices) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)
