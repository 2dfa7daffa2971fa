"""The order of a rank's parameters in one flat buffer. The buffer is divided into shard units, and
ZeRO divides each shard unit into equal shards.

A shard unit is gathered or reduced by one collective. Each rank of the shard group owns one shard
of every shard unit (Rajbhandari et al. 2020, arXiv 1910.02054, section 5).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ptdmpi.base.box import Box, runs
from ptdmpi.comm.communicator import Communicator, OneRank
from ptdmpi.config.zero import Sharing
from ptdmpi.model.parameters import Entry, HeldShare, Parameter
from ptdmpi.plan.layer.parts import ALIGNMENT, aligned
from ptdmpi.plan.shape.dealt import Slice, slices

ALL = "all"  # the name of the shard unit for all parameters that have no separate unit


@dataclass(frozen=True)
class Portion:
    """A rank's part of the model and its state: the rank's position on the tensor axis, the stage
    of ZeRO (`zero`), and the shard group. Each tensor that this stage of ZeRO shards is divided
    among the ranks of the shard group. If the shard group has only one rank, this rank stores such
    tensors completely."""

    tensor_rank: int = 0
    tensor_size: int = 1
    zero: int = 0
    group: Communicator = field(default_factory=OneRank)

    @property
    def sharing(self) -> Sharing:
        """Return the stage of ZeRO and the number of ranks of the shard group as a `Sharing`
        object, which says what is sharded."""
        return Sharing(self.zero, self.group.size)

    @property
    def shards_state(self) -> bool:
        """Return True if this rank updates only a part of the parameters."""
        return self.sharing.shards_state

    @property
    def shards_gradients(self) -> bool:
        """Return True if this rank stores only a part of the gradients."""
        return self.sharing.shards_gradients

    @property
    def shards_weights(self) -> bool:
        """Return True if this rank stores only a part of the weights."""
        return self.sharing.shards_weights

    @property
    def shards(self) -> int:
        """Return the number of shards into which a shard unit is cut."""
        return self.sharing.state_shards

    @property
    def frozen_shards(self) -> int:
        """Return the number of shards into which a shard unit of frozen weights is cut."""
        return self.sharing.weight_shards


@dataclass(frozen=True)
class Unit:
    """A shard unit: consecutive entries (parameters) at the positions [start, stop) of the flat
    buffer. Parameters with weight decay come first. The gradients of these entries are not summed
    over the axes `apart`, because the ranks along these axes have different parameters (see
    `Declaration`)."""

    name: str
    start: int
    stop: int
    apart: tuple[str, ...] = ()


class LogicalPart(NamedTuple):
    """A slice of a logical (undivided) parameter. `box` is the position of the slice in the
    parameter, and `values` are the values of the slice. `share` is the larger slice that the tensor
    rank has and that contains this slice."""

    box: Box
    values: Tensor
    share: HeldShare


@dataclass(frozen=True)
class OwnPart:
    """The elements of a parameter (`entry`) that this rank owns: the elements [begin, end) of the
    parameter's local tensor, in row-major order. The owned elements begin at index `offset` of this
    rank's part of shard unit number `unit`. Shard units of frozen weights are numbered separately.
    """

    entry: Entry
    begin: int
    end: int
    unit: int
    offset: int

    @property
    def length(self) -> int:
        """Return the number of elements that this rank owns."""
        return self.end - self.begin

    def view(self, parts: Sequence[Tensor]) -> Tensor:
        """Return a flat view of the elements that this rank owns. `parts` has this rank's part of
        each shard unit."""
        return parts[self.unit][self.offset : self.offset + self.length]

    def padded(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the view that `view` returns, extended by the padding that follows the owned
        elements."""
        return parts[self.unit][self.offset : self.offset + aligned(self.length)]

    def boxes(self, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield (slice of the local tensor, view of the slice's values in `flat`). Together, the
        slices contain exactly the owned elements. `flat` has only the values of the owned
        elements."""
        done = 0
        for box in runs(self.entry.shape, self.begin, self.end):
            yield box, flat[done : done + box.elements].view(box.size)
            done += box.elements

    def logical(self, flat: Tensor, tensor_rank: int, tensor_size: int) -> Iterator[LogicalPart]:
        """Yield the owned elements as slices of the logical (undivided) parameter, with views of
        `flat`, which has the values of these elements. The elements belong to tensor rank
        `tensor_rank` of `tensor_size` ranks. Padding, which is not part of the logical parameter,
        is skipped."""
        shares = list(self.entry.declaration.held(tensor_rank, tensor_size))
        for box, view in self.boxes(flat):
            for share in shares:
                common = box.overlap(share.local)
                if common is not None:
                    values = view[common.relative(box).index]
                    place = common.relative(share.local).within(share.logical)
                    yield LogicalPart(place, values, share)


class FlatOrder:
    """The positions of one rank's parameters in flat buffers, and the part of the buffers that the
    rank owns.

    `named` has (logical name, parameter) of all pipeline stages of the rank. A name that occurs
    twice is a tied weight, such as a table that is used as embedding and as head. Both uses of a
    tied weight have the same storage. Each use has its own gradient, so that the two gradients can
    be reduced separately and then added. `second` has the positions of the gradients of the second
    uses. `unit_of` maps a parameter's name to the name of its shard unit. Parameters that do not
    train are in `packed` if they are quantized; otherwise they are in `frozen`. The parameters in
    `frozen` have a separate flat buffer, with its own shard units.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        portion: Portion,
        unit_of: Callable[[str], str] = lambda name: ALL,
    ) -> None:
        self.portion = portion
        self.first: dict[str, Parameter] = {}
        self.again: dict[str, Parameter] = {}
        for name, parameter in named:
            (self.again if name in self.first else self.first)[name] = parameter
        self.entries: dict[str, Entry] = {}
        self.second: dict[str, Entry] = {}
        self.frozen: dict[str, Entry] = {}
        trained = {n: p for n, p in self.first.items() if p.declaration.trains}
        self.units = self._placed(trained, self.entries, unit_of, portion.shards)
        self.size = self.units[-1].stop if self.units else 0
        twice = {name: p for name, p in self.again.items() if p.declaration.trains}
        self.gradient_size = self.size + self._end(
            _place(twice, self.second, self.size) - self.size, portion.shards
        )
        # The gradients of the second uses of tied weights are in a separate shard unit. This unit
        # has no weights, because the weights are in the shard unit of the first use.
        second = Unit("second", self.size, self.gradient_size)
        self.gradient_units = [*self.units, second] if twice else self.units
        idle = {name: p for name, p in self.first.items() if not p.declaration.trains}
        whole = {name: p for name, p in idle.items() if not p.declaration.packed}
        # if frozen weights are sharded, they are divided into shard units in the same way as
        # parameters that train
        apart = portion.frozen_shards > 1
        self.frozen_units = self._placed(
            whole,
            self.frozen,
            unit_of if apart else lambda name: ALL,
            portion.frozen_shards,
        )
        self.packed = {
            name: Entry(name, p.declaration, 0, tuple(p.shape))
            for name, p in idle.items()
            if p.declaration.packed
        }

    def _placed(
        self,
        parameters: Mapping[str, Parameter],
        entries: dict[str, Entry],
        unit_of: Callable[[str], str],
        shards: int,
    ) -> list[Unit]:
        """Create the entry (the position in the flat buffer) of each parameter. Shard units follow
        each other in the order in which they first occur in `parameters`. Return the shard
        units."""
        groups: dict[tuple[str, tuple[str, ...]], dict[str, Parameter]] = {}
        for name, parameter in parameters.items():
            key = (unit_of(name), parameter.declaration.apart)
            groups.setdefault(key, {})[name] = parameter
        units: list[Unit] = []
        start = 0
        for (unit, apart), group in groups.items():
            # Place parameters with weight decay before parameters without weight decay. If all
            # parameters have the same learning rate, the optimizer then updates at most two slices
            # of each shard unit.
            end = start
            for decay in (True, False):
                some = {n: p for n, p in group.items() if p.declaration.decay == decay}
                end = _place(some, entries, end)
            units.append(Unit(unit, start, start + self._end(end - start, shards), apart))
            start = units[-1].stop
        return units

    @staticmethod
    def _end(length: int, shards: int) -> int:
        """Return `length`, rounded up to a multiple of `shards` times ALIGNMENT, so that it can be
        cut into `shards` equal shards."""
        grain = ALIGNMENT * shards
        return -(-length // grain) * grain

    def place(self, unit: Unit) -> tuple[int, int]:
        """Return the start and the stop of this rank's part of a shard unit in the flat buffer."""
        return self._share(unit, self.portion.shards)

    def _share(self, unit: Unit, shards: int) -> tuple[int, int]:
        share = (unit.stop - unit.start) // shards
        first = unit.start + share * (self.portion.group.rank if shards > 1 else 0)
        return first, first + share

    def own_part(self, entry: Entry) -> OwnPart | None:
        """Return this rank's part of an entry (a parameter in the buffer). If the parameter trains,
        this rank has the summed gradient of this part, and updates this part. For the second use of
        a tied weight, only the gradient is in the buffer. Return None if this rank has no part of
        the entry."""
        units = self.gradient_units
        shards = self.portion.shards
        if not entry.declaration.trains:
            units = self.frozen_units
            shards = self.portion.frozen_shards
        number = unit_number(units, entry)
        unit = units[number]
        first, last = self._share(unit, shards)
        stop = entry.start + entry.elements
        begin, end = (min(max(at, entry.start), stop) for at in (first, last))
        if begin >= end:
            return None
        return OwnPart(
            entry=entry,
            begin=begin - entry.start,
            end=end - entry.start,
            unit=number,
            offset=begin - first,
        )

    def slices(self, entry: Entry) -> list[Slice]:
        """Return the slices into which sharding divides an entry (a parameter in the buffer), each
        with the number of the shard that contains it. The entry must belong to a parameter that
        trains."""
        unit = self.units[unit_number(self.units, entry)]
        own = range(entry.start, entry.start + entry.elements)
        return slices(own, range(unit.start, unit.stop), self.portion.shards)

    def own_parts(self, names: Collection[str] | None = None) -> Iterator[OwnPart]:
        """Yield this rank's part of each parameter that trains, or only of the parameters with the
        given `names`."""
        for name in self.entries if names is None else names:
            held = self.own_part(self.entries[name])
            if held is not None:
                yield held

    def own_frozen(self) -> Iterator[OwnPart]:
        """Yield this rank's part of each frozen parameter."""
        parts = map(self.own_part, self.frozen.values())
        return (held for held in parts if held is not None)


def unit_number(units: Sequence[Unit], entry: Entry) -> int:
    """Return the number of the shard unit that contains an entry (a parameter in the buffer)."""
    return next(n for n, unit in enumerate(units) if entry.start < unit.stop)


def _place(parameters: Mapping[str, Parameter], entries: dict[str, Entry], start: int) -> int:
    """Place the parameters in the flat buffer, one after the other from position `start` on, and
    store their positions in `entries`. Return the position after the last parameter."""
    for name, parameter in parameters.items():
        entries[name] = Entry(name, parameter.declaration, start, tuple(parameter.shape))
        start += aligned(parameter.numel())
    return start
