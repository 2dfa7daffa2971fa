"""The order of a rank's parameters in one flat buffer, divided into shard units (of ZeRO), which
are cut into equal shards.

A shard unit is gathered or reduced in one operation. Each rank of the shard group owns an equal
part of every unit that `zero` shards (Rajbhandari et al. 2020, arXiv 1910.02054, section 5).
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
    """A rank's part of the model and its state: the rank's number on the tensor axis, and its
    number in the shard group. The ranks of the shard group share the tensors that `zero` shards. If
    the shard group has only one rank, this rank stores these tensors completely."""

    tensor_rank: int = 0
    tensor_size: int = 1
    zero: int = 0
    group: Communicator = field(default_factory=OneRank)

    @property
    def sharing(self) -> Sharing:
        """Return the stage of ZeRO and the number of ranks that share the tensors it covers."""
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
    """A shard unit: consecutive entries at [start, stop) of the flat buffer. Entries with weight
    decay come first. `apart` are the axes along which the gradients of these entries are not
    summed, because each rank has different parameters there (see `Declaration`)."""

    name: str
    start: int
    stop: int
    apart: tuple[str, ...] = ()


class LogicalPart(NamedTuple):
    """A part of a logical tensor: its slice of the logical tensor, its values, and the share that
    it belongs to."""

    box: Box
    values: Tensor
    share: HeldShare


@dataclass(frozen=True)
class OwnPart:
    """The elements [begin, end) of an entry's local tensor, in row-major order, which this rank
    has. These elements begin at `offset` of this rank's part of shard unit number `unit`. Shard
    units of frozen weights are counted separately."""

    entry: Entry
    begin: int
    end: int
    unit: int
    offset: int

    @property
    def length(self) -> int:
        """Return the number of elements."""
        return self.end - self.begin

    def view(self, parts: Sequence[Tensor]) -> Tensor:
        """Return a flat view of these elements; `parts` has this rank's part of each shard unit."""
        return parts[self.unit][self.offset : self.offset + self.length]

    def padded(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the same view as `view`, with the padding after it."""
        return parts[self.unit][self.offset : self.offset + aligned(self.length)]

    def boxes(self, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield the slices of the local tensor that these elements form, each with its view in
        `flat`, which has their values."""
        done = 0
        for box in runs(self.entry.shape, self.begin, self.end):
            yield box, flat[done : done + box.elements].view(box.size)
            done += box.elements

    def logical(self, flat: Tensor, tensor_rank: int, tensor_size: int) -> Iterator[LogicalPart]:
        """Yield the parts of the logical tensor that these elements form, as views of `flat`.
        Padding is not part of the logical tensor."""
        shares = list(self.entry.declaration.held(tensor_rank, tensor_size))
        for box, view in self.boxes(flat):
            for share in shares:
                common = box.overlap(share.local)
                if common is not None:
                    values = view[common.relative(box).index]
                    place = common.relative(share.local).within(share.logical)
                    yield LogicalPart(place, values, share)


class FlatOrder:
    """The positions of one rank's parameters in flat buffers, and the part of them that the rank
    owns.

    `named` has (logical name, parameter) of all stages of the rank. A name that occurs twice is a
    tied weight. Both occurrences of a tied weight share their storage, and the `second` has a
    gradient of its own, so that the two gradients can be reduced separately and then added.
    `unit_of` maps a name to the name of its shard unit. Parameters that do not train are `packed`
    if they are quantized, and otherwise `frozen`, in a separate flat buffer with its own shard
    units.
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
        # second gradients are reduced like a shard unit, although they have no separate weights
        second = Unit("second", self.size, self.gradient_size)
        self.gradient_units = [*self.units, second] if twice else self.units
        idle = {name: p for name, p in self.first.items() if not p.declaration.trains}
        whole = {name: p for name, p in idle.items() if not p.declaration.packed}
        # if frozen weights are sharded, they are divided into the same units as other parameters
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
        """Give each parameter its entry, one shard unit after the other, in the order in which the
        units occur. Return the units."""
        groups: dict[tuple[str, tuple[str, ...]], dict[str, Parameter]] = {}
        for name, parameter in parameters.items():
            key = (unit_of(name), parameter.declaration.apart)
            groups.setdefault(key, {})[name] = parameter
        units: list[Unit] = []
        start = 0
        for (unit, apart), group in groups.items():
            # first the parameters with weight decay, then the others: the optimizer has at most one
            # slice of a unit for each
            end = start
            for decay in (True, False):
                some = {n: p for n, p in group.items() if p.declaration.decay == decay}
                end = _place(some, entries, end)
            units.append(Unit(unit, start, start + self._end(end - start, shards), apart))
            start = units[-1].stop
        return units

    @staticmethod
    def _end(length: int, shards: int) -> int:
        """Return `length`, rounded up to a number that can be cut into equal shards."""
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
        """Return the part of an entry that this rank updates, and for which it has the reduced
        gradient. For the second use of a tied table, return the part whose gradient this rank has;
        for a frozen entry, the part that it stores. Return None if there is no such part."""
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
        """Return, for each shard, the slice of an entry that it has. The entry must be one that
        trains."""
        unit = self.units[unit_number(self.units, entry)]
        own = range(entry.start, entry.start + entry.elements)
        return slices(own, range(unit.start, unit.stop), self.portion.shards)

    def own_parts(self, names: Collection[str] | None = None) -> Iterator[OwnPart]:
        """Yield `own_part` of all entries that train, or of those with these names."""
        for name in self.entries if names is None else names:
            held = self.own_part(self.entries[name])
            if held is not None:
                yield held

    def own_frozen(self) -> Iterator[OwnPart]:
        """Return an iterator over `own_part` of all frozen entries."""
        parts = map(self.own_part, self.frozen.values())
        return (held for held in parts if held is not None)


def unit_number(units: Sequence[Unit], entry: Entry) -> int:
    """Return the number of the shard unit that contains an entry."""
    return next(n for n, unit in enumerate(units) if entry.start < unit.stop)


def _place(parameters: Mapping[str, Parameter], entries: dict[str, Entry], start: int) -> int:
    """Give each parameter an entry, one after the other from `start`. Return the end of the last
    one."""
    for name, parameter in parameters.items():
        entries[name] = Entry(name, parameter.declaration, start, tuple(parameter.shape))
        start += aligned(parameter.numel())
    return start
