"""The training state of a rank: all values that an update changes, ordered by kind and logical name
(the name of a parameter in the unsharded model).

A kind of state has one number for each element of a parameter. The kinds are the master `weights`,
each moment of the optimizer, and the values that the data-parallel method stores. The values of a
kind are either equal on all replicas, or different. The state also contains a few counters
(`Counters`).

Code that stores or compares state, such as checkpoints, iterates over `State.pieces`: slices of
logical (undivided) tensors with their values. Each slice has the list of axes along which ranks
have different slices. Along all other axes, ranks have the same slice with the same values.

How a rank stores its part of the state depends on the parameter and on the kind of state, and only
this module knows how. There is one exception: after the loss of a rank, the surviving ranks send
the tensors `State.flats` unchanged. This is correct, because sender and receiver store the same
part of the state in the same way.
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
from ptdmpi.model.parameters import Entry
from ptdmpi.plan.layer.low_bit import KIND_OF_CODES, KIND_OF_SCALES
from ptdmpi.plan.layer.parts import aligned
from ptdmpi.plan.layout.grid import SHARD_AXES

# The name under which `State.residents` yields the weights that matrix products use, if they are
# not the master weights.
USED = "weights in use"


def key(kind: str, name: str, replica: int | None = None) -> str:
    """Return the name that a tensor of the state has in checkpoint files, such as
    `weights/layers.0.mlp.up.weight`. `kind` is the tensor's kind of state, and `name` is the
    parameter to which it belongs. If replicas differ, the name has the number of the replica:
    `weights@3/layers.0.mlp.up.weight`."""
    return f"{kind}/{name}" if replica is None else f"{kind}@{replica}/{name}"


@dataclass(frozen=True)
class Kept:
    """The properties of a kind of state. `differs` has the axes along which replicas have different
    values. `begins` determines the values before the first step, and after a resume from a
    checkpoint without this kind: zeros, or the values of the weights. If `needed` is True, a run
    cannot resume from a checkpoint without this kind. `names` has the parameters that have this
    kind of state; None means all parameters. If `early` is True, values of this kind already change
    when gradients are reduced, and not only in the update."""

    differs: tuple[str, ...] = ()
    begins: Literal["zero", "weights"] = "zero"
    needed: bool = False
    names: frozenset[str] | None = None
    early: bool = False


@dataclass
class Counters:
    """The counters of the optimizer: the number of updates (without skipped steps), the loss scale,
    and the number of steps without overflow since the loss scale was last changed. `exponents` has,
    for each operand of an 8-bit product whose scale is computed from earlier steps, the exponents
    of the last steps, the newest last (`low_bit.delayed`). The counters are equal on all ranks."""

    updates: int = 0
    loss_scale: float = 1.0
    good_steps: int = 0
    exponents: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """A slice of a logical (undivided) tensor of shape `shape`, and the slice's values on this
    rank, which are a view of the state.

    `cut_by` has the axes along which ranks have different slices. Along all other axes ranks have
    the same slice, and write it to checkpoints together. `owned` is False if this rank must not
    write the slice to checkpoints, because another rank along an axis of `cut_by` has a copy of the
    slice and writes it. Examples are the second copy of a tied table, and copies of key heads on
    neighbouring tensor ranks. `replica` is the number of the replica if replicas differ in this
    kind, otherwise None.
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
        """Return the name that the logical tensor has in checkpoint files (see the function
        `key`)."""
        return key(self.kind, self.name, self.replica)

    def rows(self, first: int, last: int) -> "Piece":
        """Return a smaller slice, with only the rows [first, last) of dim 0, counted from the first
        row of this slice."""
        return replace(self, box=self.box.rows(first, last), values=self.values[first:last])

    def copied(self) -> "Piece":
        """Return a copy of this slice with its values on the host. If the copy is pickled, only
        these values are pickled, and not the larger tensor of which they were a view."""
        return replace(self, values=self.values.to("cpu", copy=True))


@dataclass(frozen=True)
class Resident:
    """The values of a parameter in this rank's memory, as a flat tensor with padding. `kind` is a
    kind of the state, or a name for weights that are not part of the state. `cut_by` has the axes
    along which ranks have different values; along all other axes ranks have the same values. If
    `early` is True, the values already change when gradients are reduced, and not only in the
    update."""

    kind: str
    name: str
    values: Tensor
    cut_by: tuple[str, ...]
    early: bool = False


@dataclass(frozen=True)
class Kind:
    """One kind of the state, such as the master weights or the first moments. `parts` has a flat
    tensor for this rank's part of each shard unit (a group of parameters, see `flat`). `held`
    has the positions of the parameters in these tensors, and `kept` has the properties of the
    kind."""

    parts: Sequence[Tensor]
    held: Mapping[str, OwnPart]
    kept: Kept = field(default_factory=Kept)


class State:
    """The training state for the parameters of a buffer. The attribute `kinds` has the kinds of
    state by name, including the weights. The argument `kinds` has all kinds except the weights.

    `borrowed` has the names of this rank's parameters that are second copies, such as a tied table
    on the last pipeline rank. The rank with the first copy writes it to checkpoints. `differs` has
    the axes along which replicas have different weights, which some data-parallel methods permit.
    `peers` is the group of the replicas, including this one. If `scales_loss` is True, the loss
    scale is part of the state; otherwise it is always 1. If `delays_scales` is True, the exponents
    of delayed scales are part of the state. Parameters that do not train are not part of the state,
    because no update changes them.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        kinds: Mapping[str, Kept] | None = None,
        borrowed: Collection[str] = (),
        *,
        differs: tuple[str, ...] = (),
        scales_loss: bool = False,
        delays_scales: bool = False,
        peers: Communicator | None = None,
    ) -> None:
        self.buffer = buffer
        self.borrowed = borrowed
        self.scales_loss = scales_loss
        self.delays_scales = delays_scales
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
        # Kinds of state that begin with zeros are skipped: they are already zero, and if the state
        # is stored in a file, writing zeros again would load the file into memory.
        self.begin([name for name, kind in self.kinds.items() if kind.kept.begins != "zero"])
        self.counters = Counters()
        # A mark in the device's queue of work. The device passes the mark when all copies of the
        # state that have begun are complete. Updates wait for the mark.
        self.read: Passed = copies_of(buffer.device).passed()
        # a function that completes unfinished operations; it is called before the state, or the
        # mean of the state over replicas, is read
        self.settle: Callable[[], None] = lambda: None

    def begin(self, kinds: Collection[str]) -> None:
        """Set the values of the kinds of state `kinds` to their initial values: zeros, or the
        current weights."""
        for name in kinds:
            kind = self.kinds[name]
            if name != WEIGHTS:
                for part, master in zip(kind.parts, self.buffer.masters, strict=True):
                    part.zero_() if kind.kept.begins == "zero" else part.copy_(master)
                self.let_go()

    @contextlib.contextmanager
    def averaged(self, kind: str) -> Iterator[None]:
        """Return a context in which the values of `kind` are the mean over replicas, if replicas
        differ in this kind. All replicas must call this method, and the mean is bitwise equal on
        all of them. Inside the context, the replica's own values are stored in the memory of the
        gradients, so the gradients are lost. The caller must update the weights from the master
        weights (`changed`) inside the context, and again after it."""
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
        """Overwrite the gradients with the difference between this replica's weights and the mean
        over all replicas."""
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
        """Return how many elements the flat tensor of gradients has in addition to the elements of
        `parts`, which has this rank's part of each shard unit. The additional elements are the
        gradient of the second use of a tied table."""
        return len(self.buffer.gradients) - sum(map(len, parts))

    @property
    def flats(self) -> list[Tensor]:
        """Return all flat tensors of the state. Ranks that have the same part of the state return
        equal tensors."""
        return [part for kind in self.kinds.values() for part in kind.parts]

    def view(self, kind: str, name: str) -> Tensor:
        """Return this rank's part of one kind of one parameter, as a flat view without padding."""
        return self.kinds[kind].held[name].view(self.kinds[kind].parts)

    def pieces(self, mean: bool = False) -> Iterator[Piece]:
        """Yield all pieces of the state that this rank has, parameter by parameter, and for each
        parameter kind by kind. If `mean` is True, the pieces are marked as equal on all replicas,
        even in kinds in which replicas differ; this is correct inside the context `averaged`."""
        self.settle()
        for name in self.buffer.entries:
            for kind, all_held in self.kinds.items():
                if name in all_held.held:
                    differs = () if mean else all_held.kept.differs
                    yield from self._pieces(kind, all_held.held[name], all_held.parts, differs)

    def frozen(self) -> Iterator[Piece]:
        """Yield this rank's slices of the frozen weights, including the codes and scales of
        quantized weights. The frozen weights are not part of the state."""
        for held in self.buffer.own_frozen():
            yield from self._pieces(WEIGHTS, held, self.buffer.idle_parts)
        place = (self.buffer.portion.tensor_rank, self.buffer.portion.tensor_size)
        for name, entry in self.buffer.packed.items():
            for kind, shape, box, values in self.buffer.few_bits.boxes(entry, *place):
                yield Piece(
                    kind=kind,
                    name=name,
                    shape=shape,
                    box=box,
                    values=values,
                    cut_by=entry.declaration.cut_by,
                )

    def residents(self) -> Iterator[Resident]:
        """Yield all tensors that stay in this rank's memory from step to step: the state, the
        frozen weights, and the weights that matrix products use, if they are not the master
        weights."""
        for kind, all_held in self.kinds.items():
            for name, own in all_held.held.items():
                cut_by = (*own.entry.declaration.cut_by, *all_held.kept.differs)
                values = own.padded(all_held.parts)
                yield Resident(kind, name, values, cut_by, early=all_held.kept.early)
        buffer = self.buffer
        if buffer.portion.shards_weights:
            if not buffer.one_type:
                yield from self._own_weights(buffer.own_parts(), buffer.weight_parts)
        elif buffer.portion.shards_state or not buffer.one_type:
            for name, entry in buffer.entries.items():
                values = buffer.weights[entry.start : entry.start + aligned(entry.elements)]
                yield Resident(USED, name, values, self._whole_by(entry))
        yield from self._own_weights(buffer.own_frozen(), buffer.idle_parts)
        for name, few_bits in buffer.few_bits.of.items():
            for kind, values in (
                (KIND_OF_CODES, few_bits.codes),
                (KIND_OF_SCALES, few_bits.scales),
            ):
                yield Resident(kind, name, values.flatten(), self._whole_by(buffer.packed[name]))

    def _own_weights(self, owned: Iterable[OwnPart], parts: Sequence[Tensor]) -> Iterator[Resident]:
        """Yield this rank's parts of weights (`owned`) as `Resident` objects. With ZeRO stage 3,
        ranks along the axes of the shard group have different parts."""
        for own in owned:
            cut_by = self._whole_by(own.entry)
            if self.buffer.portion.shards_weights:
                cut_by = (*cut_by, *SHARD_AXES)
            yield Resident(USED, own.entry.name, own.padded(parts), cut_by)

    def _whole_by(self, entry: Entry) -> tuple[str, ...]:
        """Return the axes along which ranks use different weights of the parameter `entry` in
        matrix products. They are the axes along which the parameter's state differs, without the
        axes of the shard group, because ranks of a shard group have different parts of the state,
        but use the same weights."""
        cut_by = entry.declaration.cut_by
        if entry.declaration.trains:
            cut_by = (*cut_by, *self.kinds[WEIGHTS].kept.differs)
        return tuple(axis for axis in cut_by if axis not in SHARD_AXES)

    def gradients(self) -> Iterator[Piece]:
        """Yield the gradients as pieces: slices of logical tensors with their values. The pieces
        have the same slices as the pieces of the weights. The gradients are not part of the state.
        After an update they are undefined, because a kernel of the update may set them to zero."""
        for held in self.buffer.own_parts():
            yield from self._pieces("gradients", held, self.buffer.reduced)

    def _pieces(
        self, kind: str, held: OwnPart, parts: Sequence[Tensor], differs: tuple[str, ...] = ()
    ) -> Iterator[Piece]:
        portion = self.buffer.portion
        owned = held.entry.name not in self.borrowed
        for piece in pieces_of(
            kind,
            held,
            held.view(parts),
            tensor_rank=portion.tensor_rank,
            tensor_size=portion.tensor_size,
        ):
            yield replace(
                piece,
                owned=owned and piece.owned,
                cut_by=(*piece.cut_by, *differs),
                replica=self.peers.rank if differs else None,
            )

    def restore(self, counters: Counters) -> None:
        """Set the counters to stored values. The stored loss scale and the stored exponents are
        used only if this run's precision needs them."""
        self.counters.updates = counters.updates
        if self.scales_loss:
            self.counters.loss_scale = counters.loss_scale
            self.counters.good_steps = counters.good_steps
        self.counters.exponents = counters.exponents if self.delays_scales else {}

    def changed(self, written: bool = False) -> None:
        """Update the weights from the master weights, after the master weights were changed. If
        `written` is True, this rank's own part of the weights is already up to date."""
        self.buffer.refresh_weights(written)

    def let_go(self) -> None:
        """Free the memory into which the pieces of the state have been read, if the state is stored
        in a file."""
        self.buffer.storage.let_go()


def _gathered(
    held: Mapping[str, OwnPart], names: Collection[str], units: int
) -> tuple[dict[str, OwnPart], list[int]]:
    """Return the layout of flat tensors that contain only the parameters `names`, in the order of
    `held`. There is one flat tensor for each of the `units` shard units. The first returned value
    has the position of each parameter, and the second has the length of each flat tensor."""
    own = dict[str, OwnPart]()
    lengths = [0] * units
    for name, part in held.items():
        if name in names:
            own[name] = replace(part, offset=lengths[part.unit])
            lengths[part.unit] += aligned(part.length)
    return own, lengths


def pieces_of(
    kind: str, held: OwnPart, values: Tensor, *, tensor_rank: int, tensor_size: int
) -> Iterator[Piece]:
    """Yield the pieces of `held`, the part of a parameter on tensor rank `tensor_rank` of
    `tensor_size` ranks. `values` is a flat tensor with the values of this part. `kind` is the kind
    of the pieces, such as "weights"."""
    declaration = held.entry.declaration
    name = held.entry.name
    for box, view, share in held.logical(values.detach(), tensor_rank, tensor_size):
        yield Piece(
            kind=kind,
            name=name,
            shape=declaration.shape,
            box=box,
            values=view,
            cut_by=declaration.cut_by,
            owned=share.counts,
        )


def assemble(pieces: Iterable[Piece]) -> tuple[dict[str, Tensor], list[str]]:
    """Assemble logical (undivided) tensors from the pieces of all ranks. All pieces must belong to
    one kind of state. Return the tensors by the name of the parameter, and the names of those
    tensors whose copies on several ranks are not bitwise equal. Tensors and names are sorted by
    name.

    An element that no rank has is set to NaN, so that every comparison with this element fails.
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
