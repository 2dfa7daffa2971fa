"""Compression blocks (`units`): parts of logical (unsharded) parameters. The blocks are the same in
every layout, that is, for all sizes of the axes.

A *line* of a parameter consists of the elements at one index of the dim that the tensor axis
divides: a row of a column-parallel weight, or a column of a row-parallel weight. A line is never
divided between ranks. `grains` returns the number of neighbouring lines that are on the same rank
for every legal size of the tensor axis. A *tile* consists of this number of neighbouring lines; its
elements are in logical order, line after line. A tile is cut into consecutive compression blocks,
or *units*, which are as long as the compressor allows. A parameter that the tensor axis does not
divide is one tile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ptdmpi.base.box import Box
from ptdmpi.engine.compress.compressor import unit_number
from ptdmpi.model.flat import FlatOrder
from ptdmpi.model.parameters import Declaration, Entry
from ptdmpi.plan.shape.codes import MOST_ELEMENTS


def grains(declaration: Declaration, most_tensor: int) -> tuple[int, ...]:
    """Return the number of neighbouring lines that are on one rank in every legal layout, for each
    part (such as query, key and value) of a parameter. The result is empty if the tensor axis does
    not divide the parameter. `most_tensor` is the largest legal size of the tensor axis; every
    legal size divides this number."""
    split = declaration.split
    if split is None:
        return ()
    lines = []
    for number, part in enumerate(split.parts):
        shares = most_tensor if split.most is None else min(most_tensor, split.most[number])
        # a vocabulary is padded to a multiple of the size of the tensor axis, so the axis may cut
        # the vocabulary after any line, and each line is a separate tile
        lines.append(part // shares if part % shares == 0 else 1)
    return tuple(lines)


@dataclass(frozen=True)
class Slab:
    """Complete tiles of one parameter on this rank. Each tile has `lines` lines of `length`
    elements.

    `box` is the slice of the local tensor that the tiles cover. `dim` is the dim along which lines
    are counted. `first` is the number of the first line in the logical parameter.
    """

    entry: Entry
    box: Box
    dim: int
    first: int
    lines: int
    length: int

    @property
    def tiles(self) -> int:
        """Return the number of tiles in this slab."""
        return self.box.size[self.dim] // self.lines

    def part(self, begin: int, end: int) -> "Slab":
        """Return a slab with only the tiles [begin, end)."""
        start = self.box.start[self.dim]
        box = self.box.along(self.dim, start + begin * self.lines, start + end * self.lines)
        return replace(self, box=box, first=self.first + begin * self.lines)

    def read(self, flat: Tensor) -> Tensor:
        """Return the tiles [tiles, lines * length] from a tensor in the order of the flat buffer;
        the result may be a view."""
        return self._moved(flat).reshape(self.tiles, -1)

    def write(self, flat: Tensor, values: Tensor) -> None:
        """Write `values` [tiles, lines * length] to the elements of `flat` that `read` reads."""
        place = self._moved(flat)
        place.copy_(values.view(place.shape))

    def _moved(self, flat: Tensor) -> Tensor:
        return self.entry.view(flat)[self.box.index].movedim(self.dim, 0)

    def numbers(self) -> Iterator[int]:
        """Yield the number of each tile, which is the same in every layout. This number and the
        number of data ranks determine which rank averages the tile."""
        # halve the hash, so that adding the index of a tile cannot overflow 64 bits
        begin = unit_number(self.entry.name, 0, 0) >> 1
        for tile in range(self.tiles):
            yield begin + self.first // self.lines + tile

    def names(self, runs: Sequence[int]) -> Iterator[int]:
        """Yield the numbers of some compression blocks (see `unit_number`), tile by tile. In each
        tile, these are the blocks whose indices within the tile are in `runs`."""
        for tile in range(self.tiles):
            for run in runs:
                yield unit_number(self.entry.name, self.first + tile * self.lines, run)


def slabs(order: FlatOrder, most_tensor: int) -> Iterator[Slab]:
    """Yield the tiles of all parameters that train on this rank, as `Slab` objects sorted by the
    parameter's name. If several tensor ranks have copies of a parameter, each of these ranks yields
    a slab for its own copy.
    """
    tensor_rank = order.portion.tensor_rank
    tensor_size = order.portion.tensor_size
    for name in sorted(order.entries):
        entry = order.entries[name]
        declaration = entry.declaration
        if declaration.split is None:
            lines = entry.shape[0]
            length = entry.elements // lines
            yield Slab(
                entry=entry, box=Box.whole(entry.shape), dim=0, first=0, lines=lines, length=length
            )
            continue
        dim = declaration.split.dim
        sizes = grains(declaration, most_tensor)
        ends = [sum(declaration.split.parts[: k + 1]) for k in range(len(sizes))]
        for held in declaration.held(tensor_rank, tensor_size):
            first = held.logical.start[dim]
            lines = next(size for size, end in zip(sizes, ends, strict=True) if first < end)
            length = held.local.elements // held.local.size[dim]
            yield Slab(
                entry=entry, box=held.local, dim=dim, first=first, lines=lines, length=length
            )


class Numbers(NamedTuple):
    """Integers [n] int64, stored twice: `here` on the device and `host` on the host."""

    here: Tensor
    host: Tensor

    @classmethod
    def of(cls, numbers: Sequence[int], device: torch.device) -> "Numbers":
        """Return the given integers, on the host and on `device`."""
        host = torch.tensor(numbers, dtype=torch.int64)
        return cls(host.to(device), host)

    def of_tiles(self, tiles: "Numbers", tile_count: int) -> "Numbers":
        """Return only the integers of the tiles whose indices are `tiles`. This object has the same
        number of integers for each of `tile_count` tiles, tile by tile."""
        return Numbers(
            self.here.view(tile_count, -1)[tiles.here].view(-1),
            self.host.view(tile_count, -1)[tiles.host].view(-1),
        )


class NumberedUnits(NamedTuple):
    """The compression blocks of one length in some tiles: their columns in a tensor [tiles, width],
    their length, and the numbers that identify the blocks, tile by tile."""

    columns: slice
    length: int
    numbers: Numbers


class TileBatch:
    """A batch of tiles of the same shape, which are processed together as a tensor [tiles, width].

    `units` has an entry for each length of compression blocks (see `NumberedUnits`). `numbers`
    [tiles] are the integers that identify the tiles.
    """

    def __init__(self, some: Sequence[Slab], longest: int, device: torch.device) -> None:
        self.slabs = some
        self.lines = some[0].lines
        self.length = some[0].length
        self.width = self.lines * self.length
        self.tiles = sum(slab.tiles for slab in some)
        dealt = [number for slab in some for number in slab.numbers()]
        self.numbers = Numbers.of(dealt, device)
        whole = self.width // longest
        self.units: list[NumberedUnits] = []
        for runs, columns, length in (
            (range(whole), slice(0, whole * longest), longest),
            (range(whole, whole + 1), slice(whole * longest, None), self.width % longest),
        ):
            if len(runs) and length:
                names = [name for slab in some for name in slab.names(runs)]
                self.units.append(NumberedUnits(columns, length, Numbers.of(names, device)))

    def read(self, flat: Tensor) -> Tensor:
        """Return a copy [tiles, width] of the tiles in a tensor that has the order of the flat
        buffer."""
        return torch.cat([slab.read(flat) for slab in self.slabs])

    def write(self, flat: Tensor, values: Tensor) -> None:
        """Write `values` [tiles, width] to the tiles in a tensor that has the order of the flat
        buffer."""
        parts = values.split([slab.tiles for slab in self.slabs])
        for slab, part in zip(self.slabs, parts, strict=True):
            slab.write(flat, part)


def batches(
    some: Sequence[Slab], longest: int, device: torch.device, most: int = MOST_ELEMENTS
) -> list[TileBatch]:
    """Return the tiles of all slabs in batches. All tiles of a batch have the same shape, and each
    tile is in one batch. A batch has at most `most` elements, unless it is a single larger tile."""
    by_shape: dict[tuple[int, int], list[Slab]] = {}
    for slab in some:
        by_shape.setdefault((slab.lines, slab.length), []).append(slab)
    batches_made = []
    for (lines, length), alike in sorted(by_shape.items(), key=lambda item: item[0]):
        room = limit = max(1, most // (lines * length))
        begun: list[Slab] = []
        for slab in alike:
            at = 0
            while at < slab.tiles:
                end = min(slab.tiles, at + room)
                begun.append(slab.part(at, end))
                room -= end - at
                at = end
                if not room:
                    batches_made.append(TileBatch(begun, longest, device))
                    begun = []
                    room = limit
        if begun:
            batches_made.append(TileBatch(begun, longest, device))
    return batches_made
