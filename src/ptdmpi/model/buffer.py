"""The flat buffers that a rank's parameters live in, whole or cut into shards.

Weights in the compute type, master weights, gradients and moments in float32 (float64 under fp64).
All parameters that train stand in one flat order; `zero` shards, of its tensors, 1 masters and
moments, 2 gradients too, 3 weights too, and with them those that do not train.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ptdmpi.base.box import Box
from ptdmpi.model.flat import ALL, FlatOrder, OwnPart, Portion, Unit
from ptdmpi.model.low_bit.held import InFewBits
from ptdmpi.model.parameters import DataTypes, Entry, Parameter
from ptdmpi.model.random import initial


class Storage:
    """Where the optimizer's state stands, masters apart from the weights and moments: here in the
    memory of `device`. `apart`: they are not on the device that trains, and the update is done
    where they are (`offload`)."""

    def __init__(self, device: torch.device, apart: bool = False) -> None:
        self.device = device
        self.apart = apart

    def zeros(self, lengths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Tensors of these lengths, all zero, one behind the other. Raises OSError where there is
        no room for them in a file."""
        flat = torch.zeros(sum(lengths), dtype=dtype, device=self.device)
        return list(flat.split(list(lengths)))

    def ahead(self, rows: Sequence[Sequence[Tensor]]) -> Iterator[Sequence[Tensor]]:
        """Row by row of tensors that stand here, as tensors in memory to look at and to change;
        once the next one is asked for a row may be stored."""
        yield from rows

    def let_go(self) -> None:
        """Nobody looks at these tensors now: memory that only mirrors them may be given back."""


class ParameterBuffer(FlatOrder):
    """All parameters of one rank: their flat order and its tensors, all zero at first. `trains`
    false: there are no gradients. `storage`: of masters, where that is not the device's memory.

    `masters` and `reduced` have a tensor for each of the units: of what this rank updates the
    weights and the gradients. Of one type, masters are weights. `gradients` is all that gradients
    are accumulated in, and `weights` those of all units, which `zero` = 3 does not have. Of frozen
    weights there are `idle_parts`, one for each of their units, all of them `idle_weights`.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        precision: DataTypes,
        device: torch.device,
        portion: Portion,
        unit_of: Callable[[str], str] = lambda name: ALL,
        trains: bool = True,
        storage: Storage | None = None,
    ) -> None:
        super().__init__(named, portion, unit_of)
        self.storage = storage or Storage(device)
        self.precision = precision
        self.device = device
        self.trains = trains
        self.one_type = precision.compute == precision.master
        # to be called when the weights have changed
        self.followers: list[Callable[[], None]] = []
        self.few_bits = InFewBits(list(self.packed.values()), device)
        self._allocate()
        for name, parameter in (*self.first.items(), *self.again.items()):
            self._attach(name, parameter, parameter is self.again.get(name))

    def _allocate(self) -> None:
        portion = self.portion
        shards = self.portion.shards
        compute = self.precision.compute
        master = self.precision.master
        zeros = partial(torch.zeros, device=self.device)
        frozen = [(u.stop - u.start) // self.portion.frozen_shards for u in self.frozen_units]
        self.idle_weights = zeros(sum(frozen), dtype=compute)
        self.idle_parts = list(self.idle_weights.split(frozen))
        lengths = [(unit.stop - unit.start) // shards for unit in self.units]
        self.weights = zeros(0 if portion.shards_weights else self.size, dtype=compute)
        if portion.shards_weights:
            self.weight_parts = list(zeros(sum(lengths), dtype=compute).split(lengths))
        else:
            self.weight_parts = [self.own(unit, self.weights) for unit in self.units]
        self.masters = self.weight_parts
        if not self.one_type:
            self.masters = self.storage.zeros(lengths, master)
        gradient_size = self.gradient_size if self.trains else 0
        self.gradients = zeros(gradient_size // portion.sharing.gradient_shards, dtype=master)
        if not self.trains:
            self.reduced = []
        elif portion.shards_gradients:
            more = [(unit.stop - unit.start) // shards for unit in self.gradient_units]
            self.reduced = list(self.gradients.split(more))
        else:
            self.reduced = [self.own(unit, self.gradients) for unit in self.gradient_units]

    def own(self, unit: Unit, flat: Tensor) -> Tensor:
        """This rank's part of a unit in a tensor of the flat order."""
        return flat[slice(*self.place(unit))]

    def _attach(self, name: str, parameter: Parameter, again: bool) -> None:
        """Let a parameter stand on its part of the buffers; `again`: it is a tied one's copy."""
        declaration = parameter.declaration
        trains = declaration.trains
        entry = (self.entries if trains else self.packed | self.frozen)[name]
        if declaration.packed or self.portion.shards_weights:
            weight = absent(entry, self.precision.compute, self.device)
        else:
            weight = entry.view(self.weights if trains else self.idle_weights)
        # `.data` cannot change a meta tensor's type and device; swapping the whole storage can.
        attached = Parameter(weight)
        torch.utils.swap_tensors(parameter, attached)
        parameter.declaration = declaration
        parameter.entry = entry
        parameter.packed = self.few_bits.of.get(name)
        if not (trains and self.trains):
            parameter.requires_grad_(False)
            return
        if again:
            parameter.second = self.second[name]
        if not self.portion.shards_gradients:
            parameter.main_grad = (parameter.second or entry).view(self.gradients)
        # Layers of ours add to main_grad themselves; this serves the others (the norms).
        parameter.register_post_accumulate_grad_hook(_add_to_main_grad)

    def initialise(self, seed: int, trained_alone: bool = False) -> None:
        """Fill the master weights from (seed, name): the same logical tensors in every layout, of
        which each rank has what it keeps, and never the whole. `trained_alone`: the frozen ones are
        loaded, and nothing is drawn for them."""
        place = (self.portion.tensor_rank, self.portion.tensor_size)
        frozen = () if trained_alone else (*self.frozen.values(), *self.packed.values())
        for entry in (*self.entries.values(), *frozen):
            flats = self.masters if entry.declaration.trains else self.idle_parts
            held: OwnPart | None
            if entry.declaration.packed:
                held = OwnPart(entry, 0, entry.elements, 0, 0)
                flats = [torch.zeros(entry.elements)]
            else:
                held = self.own_part(entry)
            if held is not None:
                _fill([piece[:2] for piece in held.logical(held.view(flats), *place)], entry, seed)
                self.storage.let_go()
            if entry.declaration.packed:
                self.few_bits.put(entry, flats[0].to(self.device))
        self.refresh_weights()

    def refresh_weights(self, written: bool = False) -> None:
        """Bring the weights up to date with the masters of all ranks of the shard group; all of
        them call it. `written`: each rank's own part is up to date."""
        for follow in self.followers:
            follow()
        if not (self.one_type or written):
            for weights, masters in zip(self.weight_parts, self.masters, strict=True):
                weights.copy_(masters)
                self.storage.let_go()
        if self.portion.shards_state and not self.portion.shards_weights:
            begun = [
                self.portion.group.all_gather_in_place(self.weights[unit.start : unit.stop])
                for unit in self.units
            ]
            for handle in begun:
                handle.wait()


def _fill(parts: Sequence[tuple[Box, Tensor]], entry: Entry, seed: int) -> None:
    """Put initial values into views of boxes of a logical tensor."""
    declaration = entry.declaration
    boxes = [box for box, _ in parts]
    drawn = initial(seed, entry.name, declaration.shape, declaration.init, boxes)
    for slab, values in drawn:
        for box, view in parts:
            common = box.overlap(slab)
            if common is not None:
                part = values[common.relative(slab).index]
                view[common.relative(box).index].copy_(part)


def absent(entry: Entry, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What stands for a weight that is not gathered: its shape, no memory, and NaN everywhere, so
    that whoever uses it all the same is seen."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(entry.shape)


def _add_to_main_grad(parameter: Parameter) -> None:
    # our own layers have added theirs already and hand autograd nothing
    if parameter.grad is not None:
        gradient = parameter.grad
        parameter.grad = None
        parameter.accumulate(lambda total: total.add_(gradient))
