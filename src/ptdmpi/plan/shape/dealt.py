"""The assignment of matrices to the ranks of a shard group (ranks that divide optimizer state among
themselves, as in ZeRO), for the optimizer Muon. Muon orthogonalizes the update of each matrix on
one rank, to which the other ranks send their slices of the matrix.

Sharding joins all parameters to one flat buffer and divides the buffer among the ranks. The order
of the parameters in the buffer is called the flat order. Some of the cuts between ranks are inside
matrices that Muon must update as a whole. One of the ranks that have a slice of such a matrix is
the owner of the matrix and orthogonalizes the update. The other ranks send their slices to the
owner, and receive their slices of the update. Different matrices have different owners, so the
ranks of a group share the work. A matrix that is completely on one rank is not sent.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ptdmpi.config import ModelConfig
from ptdmpi.config.kinds import LayerRun, Runs, trained_runs
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
    wholes_of,
)
from ptdmpi.plan.shape.parameters import ModelPart


class Slice(NamedTuple):
    """The range [begin, end) of the elements of a parameter (in row-major order) that rank `shard`
    of a group stores."""

    shard: int
    begin: int
    end: int


def slices(own: range, unit: range, shards: int) -> list[Slice]:
    """Return the slices of a parameter that the shards store. `own` is the range of the parameter's
    elements in the flat order. `unit` is the range of a set of parameters, including this one, that
    is divided evenly among `shards` shards. Shards that store no element of the parameter are left
    out."""
    share = len(unit) // shards
    low = (own.start - unit.start) // share
    high = (own.stop - 1 - unit.start) // share
    cuts = [own.start, *(unit.start + share * k for k in range(low + 1, high + 1)), own.stop]
    pairs = enumerate(itertools.pairwise(cuts), low)
    return [Slice(shard, begin - own.start, end - own.start) for shard, (begin, end) in pairs]


def owners(matrices: Iterable[tuple[Sequence[Slice], int]]) -> Iterator[int]:
    """Yield, for each matrix, the rank of the shard group that owns the matrix. `matrices` has the
    slices of each matrix, and the cost of orthogonalizing its update.

    The owner is the rank with the least work so far among the ranks that have a slice of the
    matrix. If several ranks have equally little work, the owner is the rank with the largest slice.
    """
    busy = Counter[int]()
    for held, cost in matrices:
        ranked = [(busy[part.shard], part.begin - part.end, part.shard) for part in held]
        *_, owner = min(ranked)
        busy[owner] += cost
        yield owner


@dataclass
class Dealt:
    """The work of a rank when Muon updates the matrices of the rank's stages.

    `elements` is the number of elements of these matrices that the rank stores. `makes` maps
    (matrix, number of its elements that the rank stores) to the number of such matrices that the
    rank orthogonalizes. `gives` maps each owner of matrices to the number of elements that this
    rank sends to it. `takes` maps each other rank to the number of elements that this rank receives
    from it. `most` is the largest number of elements of a single matrix that the rank sends.
    """

    elements: int = 0
    makes: Counter[tuple[Whole, int]] = field(default_factory=Counter)
    gives: Counter[int] = field(default_factory=Counter)
    takes: Counter[int] = field(default_factory=Counter)
    most: int = 0

    def room_bytes(self, tensor: int, compute_bytes: int, *, widens: bool) -> int:
        """Return the largest working memory, in bytes, of the rank's update.

        All elements that the rank sends or receives stay in memory while the rank updates its
        matrices one after the other. `widens` is True if matrices in fp16 and bf16 are multiplied
        in float32.
        """
        travels = self.gives.total() + self.takes.total()
        each = [
            room_bytes(whole, own, tensor, compute_bytes=compute_bytes, widens=widens)
            for whole, own in self.makes
        ]
        most = max(given_bytes(self.most, compute_bytes), *each, 0)
        return travels * iteration_bytes(compute_bytes) + most


def dealt(model: ModelConfig, vocab_size: int, part: ModelPart, sharing: Sharing) -> list[Dealt]:
    """Return the work of each rank of a shard group. All ranks of the group have the same stages of
    a model, which `part` describes.

    `sharing` has the number of ranks in the group, and the ZeRO stage. The ZeRO stage determines
    which parameters are divided among the ranks as one unit: all parameters except a tied table
    (ZeRO 1), or each layer (ZeRO 2 and 3).
    """
    work = [Dealt() for _ in range(sharing.ranks)]
    cut = list(_cut(model, vocab_size, part, sharing))
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
    model: ModelConfig, vocab_size: int, part: ModelPart, sharing: Sharing
) -> Iterator[tuple[Whole, list[Slice]]]:
    """Yield each matrix and its slices, in the flat order (the order of the parameters in the
    buffer that sharding divides).

    In the flat order, the parameters are grouped into units. The parameters of a unit are joined in
    one buffer, and the buffer is divided among the ranks. In each unit, embedding tables and
    matrices come before vectors. Under ZeRO 2 and 3, a unit is a layer. Under ZeRO 1, all
    parameters except a tied table are one unit. If experts are distributed over ranks, each of
    these units is followed by a separate unit with its experts."""
    runs = trained_runs(part.runs)
    units: list[Runs] = [(LayerRun(kind, 1),) for kind, count in runs for _ in range(count)]
    front = ends = after = 0
    if not covers_gradients(sharing.zero):
        units = [runs]
        after = _aligned(_of_head(model, vocab_size, part, experts=True), part.tensor)
        front, ends = _elements_of_ends(model, vocab_size, part)
    for layers, of_experts in itertools.product(units, _groups(part)):
        place, length = (front, ends)
        if of_experts:
            place, length = 0, after
        matrices: list[Whole] = []
        for kind, count in layers:
            own = [
                row
                for name, row in parameters.layer(model, kind, part.dealing).items()
                if of_experts in (None, parameters.is_of_expert(name))
            ]
            length += count * _aligned(own, part.tensor)
            matrices += wholes_of(own, part.tensor) * count
        grain = ALIGNMENT * sharing.ranks
        unit = range(-(-length // grain) * grain)
        for whole in matrices:
            yield whole, slices(range(place, place + whole.local), unit, sharing.ranks)
            place += aligned(whole.local)


def _groups(part: ModelPart) -> tuple[bool | None, ...]:
    """Return a flag for each group of parameters that has its own units. If experts are distributed
    over ranks, there are two groups: the parameters of experts (True), and all other parameters
    (False). Otherwise there is one group with all parameters (None)."""
    return (False, True) if part.dealing.ranks > 1 else (None,)


def _of_head(
    model: ModelConfig, vocab_size: int, part: ModelPart, *, experts: bool
) -> Iterator[Part]:
    """Yield the parts (groups of parameters) after the last layer, if the rank has them. If
    `experts` is True, yield only experts that are distributed over ranks; they are in separate
    units. If `experts` is False, yield only the other parts."""
    parts = parameters.head(model, vocab_size, part.dealing) if part.last else {}
    for name, row in parts.items():
        apart = part.dealing.ranks > 1 and parameters.is_of_expert(name)
        if apart == experts:
            yield row


def _elements_of_ends(model: ModelConfig, vocab_size: int, part: ModelPart) -> tuple[int, int]:
    """Return two numbers of elements for the stages that `part` describes. The first number counts
    the embedding's tables, which come before the layers in the flat order. The second number counts
    all parameters of the embedding and the head. Neither number includes a table that is used both
    before and after the layers."""
    first = parameters.embedding(model, vocab_size)
    tied = _aligned([first[WORD_TABLE]], part.tensor) * model.shares_table
    front = every = 0
    if part.first:
        tables = (table for table in first.values() if isinstance(table, Table))
        front = _aligned(tables, part.tensor) - tied
        every = _aligned(first.values(), part.tensor) - tied
    if part.last:
        every += _aligned(_of_head(model, vocab_size, part, experts=False), part.tensor) - tied
    return front, every


def _aligned(parts: Iterable[Part], tensor: int) -> int:
    """Return the number of elements, including padding, that the trained parameters among `parts`
    occupy in the flat buffer that sharding divides."""
    return sum(aligned(size) for part in trained(parts) for size in part.weights(tensor))
