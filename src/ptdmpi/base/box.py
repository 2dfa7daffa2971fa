"""Slices of tensors. A slice (`Box`) has a range of indices in every dim. All code that cuts
tensors into parts uses this module."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def rows_of(shape: Sequence[int], element_bytes: int, limit_bytes: int) -> int:
    """Return how many rows (slices along dim 0) of a tensor fit into `limit_bytes` bytes, but at
    least 1."""
    return max(1, limit_bytes // (element_bytes * max(1, math.prod(shape[1:]))))


def runs(shape: Sequence[int], start: int, stop: int) -> Iterator["Box"]:
    """Yield slices that together contain the elements with the numbers `start` <= i < `stop` of a
    tensor with this shape. The elements are numbered in row-major order, and the slices are in
    ascending order. For a matrix, there are at most three slices: the end of the first row, all
    complete rows, and the beginning of the last row. In a tensor with more than two dims, each row
    (index of dim 0) is a tensor of shape `shape[1:]`. If only a part of a row is wanted, the slices
    of this part are found in the same way."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield Box((start,), (stop,))
        return
    row = math.prod(shape[1:])
    # the rows from `first` to `last` - 1 are complete
    first = -(-start // row)
    last = stop // row
    if first > last:  # `start` and `stop` are in the same row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box.whole(shape).rows(first, last)
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator["Box"]:
    if start < stop:
        for box in runs(shape[1:], start, stop):
            yield Box((row, *box.start), (row + 1, *box.stop))


@dataclass(frozen=True)
class Box:
    """A slice of a tensor: the elements with `start[k] <= index < stop[k]` in every dim k."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> "Box":
        """Return the slice that contains all elements of a tensor with this shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> tuple[int, ...]:
        """Return the length of the slice in each dim."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        """Return the number of elements in the slice."""
        return math.prod(self.size)

    @property
    def index(self) -> tuple[slice, ...]:
        """Return the index, one Python slice for each dim, that selects the elements of this slice
        in a tensor or an array."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def along(self, dim: int, start: int, stop: int) -> "Box":
        """Return the same slice, except that its range in dim `dim` is [start, stop)."""
        return Box(
            (*self.start[:dim], start, *self.start[dim + 1 :]),
            (*self.stop[:dim], stop, *self.stop[dim + 1 :]),
        )

    def rows(self, first: int, last: int) -> "Box":
        """Return the part of this slice with the rows [first, last) of dim 0. Row 0 is the first
        row of this slice."""
        return self.along(0, self.start[0] + first, self.start[0] + last)

    def slabs(self, rows: int) -> Iterator["Box"]:
        """Cut the slice along dim 0, and yield parts with `rows` rows each. The last part may have
        fewer rows."""
        height = self.size[0]
        for first in range(0, height, rows):
            yield self.rows(first, min(height, first + rows))

    def overlap(self, other: "Box") -> "Box | None":
        """Return the overlap of this slice and `other`; None if they do not overlap."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def relative(self, origin: "Box") -> "Box":
        """Return the same slice, with indices counted from the first element of `origin`. `origin`
        is a slice of the same tensor, for example the part of the tensor that a rank stores."""
        return self._moved(origin, -1)

    def within(self, origin: "Box") -> "Box":
        """Return the same slice, with indices counted from the first element of the full tensor.
        This method is the inverse of `relative`. The indices of this object must be counted from
        the first element of `origin`."""
        return self._moved(origin, 1)

    def _moved(self, origin: "Box", sign: int) -> "Box":
        start = tuple(a + sign * o for a, o in zip(self.start, origin.start, strict=True))
        stop = tuple(b + sign * o for b, o in zip(self.stop, origin.start, strict=True))
        return Box(start, stop)

    def transposed(self) -> "Box":
        """Return the slice that selects the same elements in the transposed tensor."""
        return Box(self.start[::-1], self.stop[::-1])

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"
