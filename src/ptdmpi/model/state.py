"""The training state of a rank: everything that an update changes, by kind and logical name.

A kind is one number for each element of a parameter: the master `weights`, each moment that the
optimizer names, and what the data-parallel method keeps; replicas hold the same of it or not, kind
by kind. Beside them stand a few counters. Whoever stores or compares state (checkpoints, parity)
walks over `State.pieces`: boxes of logical tensors with their values. So how a rank holds its part
is known here alone, and may differ from entry to entry and from kind to kind: a kind has entries of
its own, and a piece says which ranks hold the same. Only survivors of a lost rank hand over
`State.flats` as they are, for whoever takes them holds the same part.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ptdmpi.base.box import Box
from ptdmpi.comm.communicator import Communicator, OneRank
from ptdmpi.comm.queues import Passed, copies_of
from ptdmpi.config.sections import WEIGHTS as WEIGHTS
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.flat import OwnPart
from ptdmpi.plan.layer.parts import aligned


def key(kind: str, name: str, replica: int | None = None) -> str:
    """What a tensor of the state is called in files: `weights/layers.0.mlp.up.weight`, or, of one
    of several replicas that differ, `weights@3/layers.0.mlp.up.weight`."""
    return f"{kind}/{name}" if replica is None else f"{kind}@{replica}/{name}"


@dataclass(frozen=True)
class Kept:
    """How a kind besides the weights is held. `differs`: the axes along which replicas hold other
    values of it. `begins`: what it holds before the first step, and where a run goes on from a
    checkpoint that has none of it; `needed`: it does not go on from such a one. `names`: of which
    parameters it is, None: of all."""

    differs: tuple[str, ...] = ()
    begins: Literal["zero", "weights"] = "zero"
    needed: bool = False
    names: frozenset[str] | None = None


@dataclass
class Counters:
    """What the optimizer counts besides its tensors: updates made (skipped steps do not count), the
    loss scale, and the steps since it was changed last. Equal on all ranks."""

    updates: int = 0
    loss_scale: float = 1.0
    good_steps: int = 0


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor of `shape`, and its values on this rank: a view of that size.

    `cut_by`: the axes along which ranks hold other boxes; on all others they hold this one too.
    `owned`: whether it is for this rank and those to write; else others do, which hold the same
    though the axes do not tell: a tied table, a share that neighbours of the tensor axis copy.
    `replica`: whose it is, of replicas that differ in it; None where they are equal.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor
    cut_by: tuple[str, ...]
    owned: bool = True
    replica: int | None = None

    @property
    def key(self) -> str:
        """The name of this tensor in files, as `key` makes it."""
        return key(self.kind, self.name, self.replica)

    def rows(self, first: int, last: int) -> "Piece":
        """Rows [first, last) of dim 0, counted from the piece's own first."""
        return replace(self, box=self.box.rows(first, last), values=self.values[first:last])

    def copied(self) -> "Piece":
        """With values of its own, on the host: as they are now, and no more than these where it is
        sent."""
        return replace(self, values=self.values.to("cpu", copy=True))


@dataclass(frozen=True)
class Kind:
    """One kind of the state: a flat tensor for this rank's part of each unit of the buffer, which
    parameters stand where in them, and how replicas hold it."""

    parts: Sequence[Tensor]
    held: Mapping[str, OwnPart]
    kept: Kept = field(default_factory=Kept)


class State:
    """The state behind a parameter buffer. `kinds`: those besides the weights, by name.

    `borrowed`: names of parameters that this rank holds a second copy of, such as a tied table on
    the last pipeline rank. `differs`: axes along which replicas hold other weights, as some methods
    of data parallelism let them; `peers` are the replicas, this one among them. `scales_loss`: the
    run's loss scale is kept, not the constant 1. Parameters that do not train are no part of it: no
    update changes them.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        kinds: Mapping[str, Kept] | None = None,
        borrowed: Collection[str] = (),
        differs: tuple[str, ...] = (),
        scales_loss: bool = False,
        peers: Communicator | None = None,
    ) -> None:
        self.buffer = buffer
        self.borrowed = borrowed
        self.scales_loss = scales_loss
        self.peers = OneRank() if peers is None else peers
        held = {part.entry.name: part for part in buffer.own_parts()}
        self.kinds = {WEIGHTS: Kind(buffer.masters, held, Kept(differs))}
        lengths = [len(part) for part in buffer.masters]
        for name, kept in (kinds or {}).items():
            own = held
            sizes = lengths
            if kept.names is not None:
                own, sizes = _gathered(held, kept.names, len(lengths))
            parts = buffer.storage.zeros(sizes, buffer.precision.master)
            self.kinds[name] = Kind(parts, own, kept)
        # what is zero already must not be touched: in a file it would come into memory
        self.begin([name for name, kind in self.kinds.items() if kind.kept.begins != "zero"])
        self.counters = Counters()
        # where whoever copies the state away is done with it: updates come behind it
        self.read: Passed = copies_of(buffer.device).passed()
        # finishes what is under way of a step, before anybody looks at pieces or their mean
        self.settle: Callable[[], None] = lambda: None

    def begin(self, kinds: Collection[str]) -> None:
        """Let these kinds hold what they begin with, given the weights as they are."""
        for name in kinds:
            kind = self.kinds[name]
            if name != WEIGHTS:
                for part, master in zip(kind.parts, self.buffer.masters, strict=True):
                    part.zero_() if kind.kept.begins == "zero" else part.copy_(master)
                self.let_go()

    @contextlib.contextmanager
    def averaged(self, kind: str) -> Iterator[None]:
        """Inside it, `kind` holds the mean over replicas that differ in it, the same bits on all;
        every one of them calls it. It takes the memory of the gradients, which are lost. Weights do
        not follow their masters (`changed`), neither into the mean nor out of it.
        """
        self.settle()
        parts = self.kinds[kind].parts if self.kinds[kind].kept.differs else ()
        own = self.buffer.gradients.split([*map(len, parts), self._beside(parts)])
        for part, kept in zip(parts, own, strict=False):
            kept.copy_(part)
        try:
            for part in parts:
                self.peers.all_reduce(part)
                part /= self.peers.size
            yield
        finally:
            self.read.computing_waits()
            for part, kept in zip(parts, own, strict=False):
                part.copy_(kept)

    def deviate(self) -> None:
        """Put what this replica's weights are away from the mean of all into the gradients."""
        self.settle()
        parts = self.kinds[WEIGHTS].parts
        whole = self.buffer.gradients.zero_()
        for part, room in zip(
            parts, whole.split([*map(len, parts), self._beside(parts)]), strict=False
        ):
            self.peers.all_reduce(room.copy_(part))
            room /= self.peers.size
            torch.sub(part, room, out=room)

    def _beside(self, parts: Sequence[Tensor]) -> int:
        """Elements of the gradients that are of no such part: of a table's second use."""
        return len(self.buffer.gradients) - sum(map(len, parts))

    @property
    def flats(self) -> list[Tensor]:
        """All tensors of the state, flat: equal on ranks that hold the same part of it."""
        return [part for kind in self.kinds.values() for part in kind.parts]

    def view(self, kind: str, name: str) -> Tensor:
        """What this rank holds of one kind of one parameter, flat, padding included."""
        return self.kinds[kind].held[name].view(self.kinds[kind].parts)

    def pieces(self, mean: bool = False) -> Iterator[Piece]:
        """Everything that this rank holds, parameter by parameter and then kind by kind. `mean`:
        of replicas that differ not each one's, but what is the same on all while it is `averaged`.
        """
        self.settle()
        for name in self.buffer.entries:
            for kind, all_held in self.kinds.items():
                if name in all_held.held:
                    differs = () if mean else all_held.kept.differs
                    yield from self._pieces(kind, all_held.held[name], all_held.parts, differs)

    def frozen(self) -> Iterator[Piece]:
        """The weights that do not train, as far as this rank keeps them, as pieces, and codes and
        scales of those that stand in few bits; no part of the state."""
        for held in self.buffer.own_frozen():
            yield from self._pieces(WEIGHTS, held, self.buffer.idle_parts)
        place = (self.buffer.portion.tensor_rank, self.buffer.portion.tensor_size)
        for name, entry in self.buffer.packed.items():
            for kind, shape, box, values in self.buffer.few_bits.boxes(entry, *place):
                yield Piece(kind, name, shape, box, values, entry.declaration.cut_by)

    def gradients(self) -> Iterator[Piece]:
        """The gradients as pieces of the same boxes; no part of the state."""
        for held in self.buffer.own_parts():
            yield from self._pieces("gradients", held, self.buffer.reduced)

    def _pieces(
        self, kind: str, held: OwnPart, parts: Sequence[Tensor], differs: tuple[str, ...] = ()
    ) -> Iterator[Piece]:
        portion = self.buffer.portion
        owned = held.entry.name not in self.borrowed
        for piece in pieces_of(
            kind, held, held.view(parts), portion.tensor_rank, portion.tensor_size
        ):
            yield replace(
                piece,
                owned=owned and piece.owned,
                cut_by=(*piece.cut_by, *differs),
                replica=self.peers.rank if differs else None,
            )

    def restore(self, counters: Counters) -> None:
        """Go on from what was counted before. Of another precision's loss scale nothing is kept."""
        self.counters.updates = counters.updates
        if self.scales_loss:
            self.counters.loss_scale = counters.loss_scale
            self.counters.good_steps = counters.good_steps

    def changed(self, written: bool = False) -> None:
        """To be called when values were put into pieces: weights follow their masters. `written`:
        this rank's have done so."""
        self.buffer.refresh_weights(written)

    def let_go(self) -> None:
        """To be called when pieces were looked at: what stands in a file need not be in memory."""
        self.buffer.storage.let_go()


def _gathered(
    held: Mapping[str, OwnPart], names: Collection[str], units: int
) -> tuple[dict[str, OwnPart], list[int]]:
    """Where some of the parameters stand in tensors that have no room for the others, in the same
    order, and how long these tensors are, unit by unit."""
    own = dict[str, OwnPart]()
    lengths = [0] * units
    for name, part in held.items():
        if name in names:
            own[name] = replace(part, offset=lengths[part.unit])
            lengths[part.unit] += aligned(part.length)
    return own, lengths


def pieces_of(
    kind: str, held: OwnPart, values: Tensor, tensor_rank: int, tensor_size: int
) -> Iterator[Piece]:
    """What one tensor rank holds of a parameter, `values` being the elements of `held`."""
    declaration = held.entry.declaration
    name = held.entry.name
    for box, view, share in held.logical(values.detach(), tensor_rank, tensor_size):
        yield Piece(kind, name, declaration.shape, box, view, declaration.cut_by, share.counts)


def assemble(pieces: Iterable[Piece]) -> tuple[dict[str, Tensor], list[str]]:
    """Logical tensors by parameter from the pieces of all ranks, all of one kind; and the names of
    those whose copies do not have the same bits. Both in order of the names.

    An element that no rank holds is NaN, so that no comparison lets it pass.
    """
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    torn = set()
    for piece in sorted(pieces, key=lambda piece: piece.name):
        name = piece.name
        place = piece.box.index
        if name not in whole:
            whole[name] = piece.values.new_full(piece.shape, torch.nan)
            filled[name] = torch.zeros(piece.shape, dtype=torch.bool)
        again = filled[name][place]
        if not torch.equal(whole[name][place][again], piece.values[again]):
            torn.add(name)
        whole[name][place] = piece.values
        filled[name][place] = True
    return whole, sorted(torn)
