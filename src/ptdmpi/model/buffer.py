"""The flat buffers that contain a rank's parameters, gradients and master weights, sharded or
unsharded.

Weights have the compute type of the run's precision; master weights, gradients and moments are
float32 (float64 if the precision is fp64). All parameters that train are in one flat buffer, in a
fixed order. ZeRO stage 1 (`zero` = 1) shards the master weights and the moments, stage 2 also
shards the gradients, and stage 3 also shards the weights, including frozen weights. The shards are
on the ranks of a shard group. One collective gathers or reduces a shard unit, which is a group of
parameters, such as those of a layer (see `flat`).
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
    """The memory of the optimizer's state. The state consists of the moments and the master
    weights. If the weights themselves are the master weights, it consists only of the moments. The
    base class uses the memory of `device`. `apart` is True if this memory is not on the training
    device (key `parallel.offload`). In this case the host computes the update."""

    def __init__(self, device: torch.device, apart: bool = False) -> None:
        self.device = device
        self.apart = apart

    def zeros(self, lengths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Return tensors of zeros with the given `lengths`. The tensors are adjacent in memory.
        Raise OSError if the disk has no space for the tensors."""
        flat = torch.zeros(sum(lengths), dtype=dtype, device=self.device)
        return list(flat.split(list(lengths)))

    def ahead(self, rows: Sequence[Sequence[Tensor]]) -> Iterator[Sequence[Tensor]]:
        """Each element of `rows` is a group of stored tensors. Read the groups into memory, one
        after the other, and yield each group. The caller may read and change the tensors of a group
        until it requests the next group. After that, a storage on the disk may write the tensors
        back to the disk."""
        yield from rows

    def let_go(self) -> None:
        """Free memory that is only a cached copy of the stored tensors. Do not call this method
        while a tensor is being read."""


class ParameterBuffer(FlatOrder):
    """The parameters of one rank: their order in flat buffers, and the buffers themselves, which
    are initially zero. If `trains` is False, no memory is allocated for gradients. `storage`
    allocates the master weights, unless the weights themselves are the master weights.

    This rank updates a part of each shard unit. For each of these parts, `masters` has a tensor
    with the master weights, and `reduced` has a tensor with the gradients. If the master type
    equals the compute type, the weights themselves are the master weights. `gradients` is the flat
    tensor in which gradients accumulate. `weights` is the flat tensor of the weights of all shard
    units; with ZeRO stage 3 it is empty. Frozen weights have separate shard units: `idle_weights`
    is the flat tensor of all frozen weights, and `idle_parts` has this rank's part of each of these
    units.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        precision: DataTypes,
        device: torch.device,
        portion: Portion,
        *,
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
        # functions that `refresh_weights` calls before it changes the weights, such as the function
        # that drops the gathered copies of weights
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
        """Return this rank's part of a shard unit, as a view of `flat`, a tensor in the order of
        the flat buffer."""
        return flat[slice(*self.place(unit))]

    def _attach(self, name: str, parameter: Parameter, again: bool) -> None:
        """Make `parameter` a view of its elements in the buffers. `again` is True for the second
        use of a tied table, which is used as embedding and as head."""
        declaration = parameter.declaration
        trains = declaration.trains
        entry = (self.entries if trains else self.packed | self.frozen)[name]
        if declaration.packed or self.portion.shards_weights:
            weight = absent(entry, self.precision.compute, self.device)
        else:
            weight = entry.view(self.weights if trains else self.idle_weights)
        # swap the tensors, because an assignment to `.data` cannot change the type and device of a
        # meta tensor
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
        # ptdmpi's own layers add their gradients to `main_grad` themselves; this hook is for other
        # modules, such as LayerNorm
        parameter.register_post_accumulate_grad_hook(_add_to_main_grad)

    def initialise(self, seed: int, trained_alone: bool = False) -> None:
        """Fill the master weights with random values that depend only on the seed and the
        parameter's name, so the undivided parameters are the same in every layout. Each rank
        computes only the part that it stores. If `trained_alone` is True, frozen weights get no
        random values, because they are loaded from a checkpoint."""
        place = (self.portion.tensor_rank, self.portion.tensor_size)
        frozen = () if trained_alone else (*self.frozen.values(), *self.packed.values())
        for entry in (*self.entries.values(), *frozen):
            flats = self.masters if entry.declaration.trains else self.idle_parts
            held: OwnPart | None
            if entry.declaration.packed:
                held = OwnPart(entry=entry, begin=0, end=entry.elements, unit=0, offset=0)
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
        """Update the weights from the master weights of all ranks of the shard group. All ranks of
        the shard group must call this method. If `written` is True, the update has already written
        this rank's own part of the weights, so this method does not copy the part from the master
        weights."""
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
    """Write the initial values of the parameter `entry` into `parts`. Each part is (slice of the
    undivided parameter, view of the memory in which this slice is stored). The values depend only
    on `seed` and the parameter's name."""
    declaration = entry.declaration
    boxes = [box for box, _ in parts]
    drawn = initial(seed, entry.name, declaration.shape, declaration.init, wanted=boxes)
    for slab, values in drawn:
        for box, view in parts:
            common = box.overlap(slab)
            if common is not None:
                part = values[common.relative(slab).index]
                view[common.relative(box).index].copy_(part)


def absent(entry: Entry, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a placeholder for a weight that is not gathered at present. It has the weight's shape
    and uses the memory of one element. Its elements are all NaN, so that a use by mistake is
    noticed."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(entry.shape)


def _add_to_main_grad(parameter: Parameter) -> None:
    # ptdmpi's own layers have already added their gradients, and return no gradient to autograd
    if parameter.grad is not None:
        gradient = parameter.grad
        parameter.grad = None
        parameter.accumulate(lambda total: total.add_(gradient))
