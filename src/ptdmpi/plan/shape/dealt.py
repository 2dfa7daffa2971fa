"""The assignment of matrices to the ranks of a shard group: each matrix has one rank that makes it
orthogonal, and the others send it their parts.

Sharding cuts the flat order of parameters, and some cuts go through matrices that Muon updates as
wholes. One of the ranks that hold a part of such a matrix, its owner, makes it orthogonal. The
other ranks send it their parts, and receive as much of the update. So the ranks of a group divide
the work, and a matrix that is on only one rank does not travel.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ptdmpi.config import ModelConfig
from ptdmpi.config.zero import Sharing, covers_gradients
from ptdmpi.plan.layer.describe import WORD_TABLE
from ptdmpi.plan.layer.parts import ALIGNMENT, Part, Table, aligned, trained
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.matrices import (
    Whole,
    effort,
    given_bytes,
    iteration_bytes,
    room_bytes,
    wholes,
)


class Slice(NamedTuple):
    """The elements [begin, end) of a parameter, row by row, that rank `shard` of a group holds."""

    shard: int
    begin: int
    end: int


def slices(start: int, stop: int, first: int, last: int, shards: int) -> list[Slice]:
    """Return the slice of each shard in the elements [start, stop) of the flat order, for the unit
    [first, last). Shards that hold none of these elements are left out."""
    share = (last - first) // shards
    low, high = (start - first) // share, (stop - 1 - first) // share
    cuts = [start, *(first + share * k for k in range(low + 1, high + 1)), stop]
    pairs = enumerate(itertools.pairwise(cuts), low)
    return [Slice(shard, begin - start, end - start) for shard, (begin, end) in pairs]


def owners(matrices: Iterable[tuple[Sequence[Slice], int]]) -> Iterator[int]:
    """Yield the owner of each matrix, given its slices and the cost to make it orthogonal.

    The owner is the rank with the least work so far among those that hold a part of the matrix.
    Among ranks with equal work it is the one that holds most.
    """
    busy = Counter[int]()
    for held, cost in matrices:
        ranked = [(busy[part.shard], part.begin - part.end, part.shard) for part in held]
        *_, owner = min(ranked)
        busy[owner] += cost
        yield owner


@dataclass
class Dealt:
    """A rank's work on the matrices of its stages.

    `elements` is the number of elements that the rank holds of these matrices. `makes` is the
    number of matrices that it makes orthogonal, by matrix and number of own elements. `gives` is
    the number of elements of others' matrices that it sends, by owner. `takes` is the number of
    elements that it receives for its own matrices, by sender. `most` is the most elements that it
    sends of one matrix.
    """

    elements: int = 0
    makes: Counter[tuple[Whole, int]] = field(default_factory=Counter)
    gives: Counter[int] = field(default_factory=Counter)
    takes: Counter[int] = field(default_factory=Counter)
    most: int = 0

    def room_bytes(self, tensor: int, compute_bytes: int, widens: bool) -> int:
        """Return the most working memory, in bytes, of the rank's update.

        Elements sent and received are in memory while the matrices are updated one after the other.
        `widens` is explained in `matrices.room_bytes`.
        """
        travels = self.gives.total() + self.takes.total()
        each = [room_bytes(*matrix, tensor, compute_bytes, widens) for matrix in self.makes]
        most = max(given_bytes(self.most, compute_bytes), *each, 0)
        return travels * iteration_bytes(compute_bytes) + most


def dealt(
    model: ModelConfig,
    vocab_size: int,
    layers: int,
    ends: tuple[bool, bool],
    tensor: int,
    sharing: Sharing,
) -> list[Dealt]:
    """Return the work of each rank of a shard group, on a pipeline rank with `layers` layers.

    `ends` says whether the rank has the first stage, and whether it has the last. `sharing` has the
    stage of ZeRO, which decides how units are cut, and the number of ranks of the group.
    """
    work = [Dealt() for _ in range(sharing.ranks)]
    cut = list(_cut(model, vocab_size, layers, ends, tensor, sharing))
    for (whole, held), owner in zip(
        cut, owners((held, effort(whole.shapes)) for whole, held in cut), strict=True
    ):
        for shard, begin, end in held:
            size = end - begin
            work[shard].elements += size
            if shard == owner:
                work[owner].makes[whole, size] += 1
            else:
                work[shard].gives[owner] += size
                work[owner].takes[shard] += size
                work[shard].most = max(work[shard].most, size)
    return work


def _cut(
    model: ModelConfig,
    vocab_size: int,
    layers: int,
    ends: tuple[bool, bool],
    tensor: int,
    sharing: Sharing,
) -> Iterator[tuple[Whole, list[Slice]]]:
    """Yield each matrix with its slices, in the flat order.

    In each unit tables and matrices come before vectors. A unit is a layer under ZeRO 2 and 3;
    under ZeRO 1 it is everything but a tied table.
    """
    by_layer = covers_gradients(sharing.zero)
    units, each = (layers, 1) if by_layer else (1, layers)
    front, length = 0, each * _aligned(parameters.layer(model).values(), tensor)
    if not by_layer:
        first, last = parameters.embedding(model, vocab_size), parameters.head(model, vocab_size)
        word = first[WORD_TABLE]
        tied = _aligned([word], tensor) * model.tie_embeddings
        if ends[0]:
            tables = (part for part in first.values() if isinstance(part, Table))
            front = _aligned(tables, tensor) - tied
            length += _aligned(first.values(), tensor) - tied
        if ends[1]:
            length += _aligned(last.values(), tensor) - tied
    grain = ALIGNMENT * sharing.ranks
    stop = -(-length // grain) * grain
    for _ in range(units):
        place = front
        for whole in wholes(model, tensor) * each:
            yield whole, slices(place, place + whole.local, 0, stop, sharing.ranks)
            place += aligned(whole.local)


def _aligned(parts: Iterable[Part], tensor: int) -> int:
    """Return the elements that the trained ones of `parts` take in a flat buffer."""
    return sum(aligned(size) for part in trained(parts) for size in part.weights(tensor))
