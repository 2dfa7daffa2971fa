"""The training state of a rank: everything that an update changes, by kind and logical name.

A kind is one number for each element of a parameter: the master `weights`, and each moment that the
optimizer names. Beside them stand a few counters. Whoever stores or compares state (checkpoints,
parity) walks over `State.pieces`: boxes of logical tensors with their values. So how a rank holds
its part is known here alone, and may differ from entry to entry and from kind to kind: a kind has
entries of its own, and a piece says which ranks hold the same. Only survivors of a lost rank hand
over `State.flats` as they are, for whoever takes them holds the same part.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ptdmpi.base.box import Box
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.flat import OwnPart
from ptdmpi.plan.layout.grid import CUTTING

# The kind of the master weights, and of the weights of a model that does not train.
WEIGHTS = "weights"


def key(kind: str, name: str) -> str:
    """What a tensor of the state is called in files: `weights/layers.0.mlp.up.weight`."""
    return f"{kind}/{name}"


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
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor
    cut_by: tuple[str, ...]
    owned: bool = True

    @property
    def key(self) -> str:
        return key(self.kind, self.name)

    def rows(self, first: int, last: int) -> "Piece":
        """Rows [first, last) of dim 0, counted from the piece's own first."""
        return replace(self, box=self.box.rows(first, last), values=self.values[first:last])

    def copied(self) -> "Piece":
        """With values of its own: as they are now, and no more than these where it is sent."""
        return replace(self, values=self.values.clone())


@dataclass(frozen=True)
class Kind:
    """One kind of the state: a flat tensor for this rank's part of each unit of the buffer, and
    which parameters stand where in them."""

    parts: Sequence[Tensor]
    held: Mapping[str, OwnPart]


class State:
    """The state behind a parameter buffer. `moments`: kinds besides the weights, all zero at first.

    `borrowed`: names of parameters that this rank holds a second copy of, such as a tied table on
    the last pipeline rank. `differs`: axes along which replicas hold other values, as some methods
    of data parallelism let them. `scales_loss`: the run's loss scale is kept, not the constant 1.
    Parameters that do not train are no part of it: no update changes them.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        moments: Sequence[str] = (),
        borrowed: Collection[str] = (),
        differs: Collection[str] = (),
        scales_loss: bool = False,
    ) -> None:
        self.buffer, self.borrowed, self.differs = buffer, borrowed, differs
        self.scales_loss = scales_loss
        held = {one.entry.name: one for one in buffer.own_parts()}
        self.kinds = {WEIGHTS: Kind(buffer.masters, held)}
        lengths = [len(part) for part in buffer.masters]
        for name in moments:
            parts = buffer.storage.zeros(lengths, buffer.precision.master)
            self.kinds[name] = Kind(parts, held)
        self.counters = Counters()

    @property
    def flats(self) -> list[Tensor]:
        """All tensors of the state, flat: equal on ranks that hold the same part of it."""
        return [part for kind in self.kinds.values() for part in kind.parts]

    def view(self, kind: str, name: str) -> Tensor:
        """What this rank holds of one kind of one parameter, flat, padding included."""
        return self.kinds[kind].held[name].view(self.kinds[kind].parts)

    def pieces(self) -> Iterator[Piece]:
        """Everything that this rank holds, parameter by parameter and then kind by kind."""
        for name in self.buffer.entries:
            for kind, all_held in self.kinds.items():
                if name in all_held.held:
                    yield from self._pieces(kind, all_held.held[name], all_held.parts)

    def gradients(self) -> Iterator[Piece]:
        """The gradients as pieces of the same boxes; no part of the state."""
        for held in self.buffer.own_parts():
            yield from self._pieces("gradients", held, self.buffer.reduced)

    def _pieces(self, kind: str, held: OwnPart, parts: Sequence[Tensor]) -> Iterator[Piece]:
        portion, owned = self.buffer.portion, held.entry.name not in self.borrowed
        for piece in pieces_of(
            kind, held, held.view(parts), portion.tensor_rank, portion.tensor_size
        ):
            yield replace(piece, owned=owned and piece.owned)

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


def pieces_of(
    kind: str, held: OwnPart, values: Tensor, tensor_rank: int, tensor_size: int
) -> Iterator[Piece]:
    """What one tensor rank holds of a parameter, `values` being the elements of `held`."""
    declaration, name = held.entry.declaration, held.entry.name
    # what is not split is whole on every tensor rank: only its stage and shard decide who holds it
    cut_by = tuple(a for a in CUTTING if a != "tensor" or declaration.split is not None)
    for box, view in held.boxes(values.detach()):
        for share in declaration.held(tensor_rank, tensor_size):
            common = box.overlap(share.local)
            if common is not None:
                logical = common.relative(share.local).within(share.logical)
                found = view[common.relative(box).index]
                yield Piece(kind, name, declaration.shape, logical, found, cut_by, share.counts)


def assemble(pieces: Iterable[Piece]) -> tuple[dict[str, Tensor], list[str]]:
    """Logical tensors by parameter from the pieces of all ranks, all of one kind; and the names of
    those whose copies do not have the same bits. Both in order of the names.

    An element that no rank holds is NaN, so that no comparison lets it pass.
    """
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    torn = set()
    for piece in sorted(pieces, key=lambda piece: piece.name):
        name, place = piece.name, piece.box.index
        if name not in whole:
            whole[name] = piece.values.new_full(piece.shape, torch.nan)
            filled[name] = torch.zeros(piece.shape, dtype=torch.bool)
        again = filled[name][place]
        if not torch.equal(whole[name][place][again], piece.values[again]):
            torn.add(name)
        whole[name][place] = piece.values
        filled[name][place] = True
    return whole, sorted(torn)
