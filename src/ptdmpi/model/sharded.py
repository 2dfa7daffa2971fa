"""The communication of a pipeline stage while it computes. Sharded gradients are reduced (ZeRO
stages 2 and 3), sharded weights are gathered (ZeRO stage 3), and all-reduces of gradients may begin
before the backward has ended.

A shard unit is a group of parameters, such as the parameters of a layer, that one collective
gathers or reduces (see `flat`).

A stage notifies its `Walk` when it reaches one of its modules in the forward, in the backward, or
in recomputation. A module (`place`) is the embedding, a layer, or the head. With ZeRO stage 3, the
weights of a module, including frozen weights, are gathered while the previous module is computed,
and are dropped after the module's computation. Only frozen quantized matrices are not sharded. With
ZeRO stages 2 and 3, the gradient of a module is unsharded only while it is computed, and is then
reduced to each rank's part (Rajbhandari et al. 2020, arXiv 1910.02054, sections 5.2 and 5.3).
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from ptdmpi.comm.communicator import Handle
from ptdmpi.model.buffer import ParameterBuffer, absent
from ptdmpi.model.flat import unit_number
from ptdmpi.model.parameters import Entry, Parameter
from ptdmpi.plan.schedule.places import EMBEDDING, at_hand


class Pool:
    """A pool of flat tensors for unsharded shard units. A tensor is reused for another shard unit
    of the same length."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._spare: list[Tensor] = []

    def take(self, length: int) -> Tensor:
        """Return a flat tensor of `length` elements with arbitrary values. Unused tensors of other
        lengths are freed. For example, the shard units of the embedding and of a layer have
        different lengths, and without this rule the tensor of the embedding would stay in memory
        for the whole step."""
        fitting = [flat for flat in self._spare if len(flat) == length]
        self._spare = fitting[1:]
        if fitting:
            return fitting[0]
        return torch.empty(length, dtype=self.dtype, device=self.device)

    def give(self, flat: Tensor) -> None:
        """Give the tensor `flat`, which is no longer used, back to the pool."""
        self._spare = [flat]


class GatheredWeights:
    """The unsharded weights of the shard units that are gathered at present, for all pipeline
    stages of a rank. Shard units are numbered; units that train have lower numbers than frozen
    units."""

    def __init__(self, buffer: ParameterBuffer, parameters: Sequence[Parameter]) -> None:
        self.buffer = buffer
        # One pool for units that train and one for frozen units. A pool keeps tensors of only one
        # length, and a layer's adapters and its frozen weights are gathered alternately. With one
        # common pool, the gather of the adapters would free the tensors for frozen weights, and
        # vice versa.
        self.pools = [Pool(buffer.precision.compute, buffer.device) for _ in range(2)]
        self._parts = [
            *zip(buffer.units, buffer.weight_parts, strict=True),
            *zip(buffer.frozen_units, buffer.idle_parts, strict=True),
        ]
        self.units: list[list[Parameter]] = [[] for _ in self._parts]
        for parameter in parameters:
            for number in self.numbers([parameter]):
                self.units[number].append(parameter)
        self._there: dict[int, tuple[Tensor, Handle]] = {}

    def numbers(self, parameters: Iterable[Parameter]) -> list[int]:
        """Return the numbers of the shard units that contain the given parameters, in ascending
        order. Quantized parameters are skipped, because they are not sharded."""
        buffer = self.buffer
        units = set[int]()
        for entry in (
            parameter.entry for parameter in parameters if not parameter.declaration.packed
        ):
            if entry.declaration.trains:
                units.add(unit_number(buffer.units, entry))
            else:
                units.add(len(buffer.units) + unit_number(buffer.frozen_units, entry))
        return sorted(units)

    def hold_all(self) -> None:
        """Gather the weights of all shard units."""
        self.hold(range(len(self.units)), ())

    def hold(self, now: Sequence[int], ahead: Sequence[int]) -> None:
        """Gather the weights of the shard units `now`, begin to gather the weights of the shard
        units `ahead`, and drop the weights of all other shard units."""
        for unit in self._there.keys() - {*now, *ahead}:
            self._drop(unit)
        for unit in (*now, *ahead):
            if unit not in self._there:
                self._gather(unit)
        for unit in now:
            self._there[unit][1].wait()

    def drop(self) -> None:
        """Drop the gathered weights of all shard units. Call this method when the weights have
        changed."""
        for unit in list(self._there):
            self._drop(unit)

    def _gather(self, number: int) -> None:
        unit, part = self._parts[number]
        flat = self._pool(number).take(unit.stop - unit.start)
        group = self.buffer.portion.group
        flat.view(group.size, -1)[group.rank].copy_(part)
        self._there[number] = flat, group.all_gather_in_place(flat)
        for parameter in self.units[number]:
            # Assign a new tensor, which has a new version counter. Autograd has saved the parameter
            # itself. With the old version counter, the next gather would make autograd report that
            # a saved tensor was changed.
            parameter.data = _placed(parameter.entry, flat, unit.start)

    def _drop(self, number: int) -> None:
        flat, handle = self._there.pop(number)
        handle.wait()
        for parameter in self.units[number]:
            parameter.data = absent(parameter.entry, flat.dtype, flat.device)
        self._pool(number).give(flat)

    def _pool(self, number: int) -> Pool:
        return self.pools[number >= len(self.buffer.units)]


class PlacedGradients(Protocol):
    """The interface of an object that follows the progress of the backward: the stage notifies it
    before and after the gradients of shard units are computed."""

    def begin(self, numbers: Sequence[int]) -> None:
        """Record that gradients are now computed only for the shard units `numbers`."""

    def end(self) -> None:
        """Record that the gradients of the shard units that the last call of `begin` named are
        complete for this microbatch."""

    def finish(self) -> None:
        """Record that the backward of this microbatch has ended."""

    def forget(self) -> None:
        """Discard the incomplete gradients of an interrupted step."""

    def looked_at(
        self, look: Callable[[Parameter], None]
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the caller can test each gradient before it is reduced: `look`
        is called with a parameter, and tests the gradient of this parameter. If gradients are not
        reduced during the backward op, `look` is not called, because the caller itself tests the
        gradients at the end of the op."""


class _Leaving(NamedTuple):
    """The unsharded gradient of a shard unit that is being reduced: the number of the unit, the
    gradient's values, and the handle of the reduction."""

    number: int
    gradient: Tensor
    handle: Handle


class ReducedGradients:
    """The unsharded gradients of shard units while the backward computes them, and their reduction
    to each rank's part."""

    def __init__(self, buffer: ParameterBuffer, parameters: Sequence[Parameter]) -> None:
        self.buffer = buffer
        self.pool = Pool(buffer.precision.master, buffer.device)
        self.units: list[list[tuple[Parameter, Entry]]] = [[] for _ in buffer.gradient_units]
        for parameter in parameters:
            if parameter.declaration.trains:
                entry = parameter.second or parameter.entry
                number = unit_number(buffer.gradient_units, entry)
                self.units[number].append((parameter, entry))
        self._open: dict[int, Tensor] = {}
        self._leaving: list[_Leaving] = []
        self._look: Callable[[Parameter], None] | None = None

    @contextlib.contextmanager
    def looked_at(self, look: Callable[[Parameter], None]) -> Iterator[None]:
        """Return a context in which `look` is called with each parameter before its gradient is
        reduced. At the time of the call, `main_grad` has this rank's gradient of one microbatch."""
        self._look = look
        try:
            yield
        finally:
            self._look = None

    def begin(self, numbers: Sequence[int]) -> None:
        """Provide memory for the gradients of the shard units `numbers`, which are computed next.
        When this method is called, the gradients of the shard units of all earlier calls are
        complete."""
        self.end()
        for number in numbers:
            unit = self.buffer.gradient_units[number]
            flat = self._open[number] = self.pool.take(unit.stop - unit.start).zero_()
            for parameter, entry in self.units[number]:
                parameter.main_grad = _placed(entry, flat, unit.start)

    def end(self) -> None:
        """Begin to reduce the gradients of the shard units that the last call of `begin` named. The
        backward has completed these gradients for this microbatch."""
        self._arrived()
        for number, flat in self._open.items():
            for parameter, _ in self.units[number]:
                if self._look is not None:
                    self._look(parameter)
                # remove the attribute, because an addition to the gradient after this point is a
                # mistake, and now raises an exception
                del parameter.main_grad
            handle = self.buffer.portion.group.reduce_scatter_in_place(flat)
            self._leaving.append(_Leaving(number, flat, handle))
        self._open = {}
        # if the transport (such as NCCL) has already completed all collectives, free their memory
        if all(handle.done() for _, _, handle in self._leaving):
            self._arrived()

    def finish(self) -> None:
        """Wait until all computed gradients are reduced and added to this rank's part."""
        self.end()
        self._arrived()

    def forget(self) -> None:
        """Discard the gradients of an interrupted step that were not reduced. The communicator
        keeps the tensors of incomplete reductions, so their memory is not reused too early."""
        self._open = {}
        self._leaving = []

    def _arrived(self) -> None:
        group = self.buffer.portion.group
        for number, flat, handle in self._leaving:
            handle.wait()
            self.buffer.reduced[number].add_(flat.view(group.size, -1)[group.rank])
            self.pool.give(flat)
        self._leaving = []


class Walk:
    """The modules (`places`) of one pipeline stage, in the order of its forward, and the
    communication at each module.

    `parameters` has the parameters that each module uses. `weights` is None if weights are
    unsharded (ZeRO stages below 3). `gradients` is None if no parameter trains, or if gradients
    need no communication during the backward.
    """

    def __init__(
        self,
        parameters: Mapping[str, Sequence[Parameter]],
        weights: GatheredWeights | None,
        gradients: PlacedGradients | None,
        buffer: ParameterBuffer,
    ) -> None:
        self.places = tuple(parameters)
        self.weights = weights
        self.gradients = gradients
        trained = {
            place: [parameter for parameter in some if parameter.declaration.trains]
            for place, some in parameters.items()
        }
        # The modules whose weights the backward needs. The backward ends at the first module that
        # trains, so it needs no weights of earlier modules. The backward also needs no weights of
        # an embedding that consists only of tables, because the backward of a look-up does not use
        # the values of a table.
        tables = all(len(parameter.shape) > 1 for parameter in parameters.get(EMBEDDING, ()))
        idle = itertools.takewhile(
            lambda place: not trained[place] or (place == EMBEDDING and tables), self.places
        )
        self._backwards = self.places[len(list(idle)) :]
        units = buffer.gradient_units
        # The numbers of the shard units that each module uses. If weights are unsharded, only
        # decentralized training needs these numbers: before it computes a module, it waits for the
        # weights of this module from the neighbours (`Decentralized`). The neighbours send only
        # weights that train, so the other units are not included.
        self._uses = {
            place: sorted({unit_number(units, parameter.entry) for parameter in trained[place]})
            if weights is None
            else weights.numbers(some)
            for place, some in parameters.items()
        }
        self._adds_to = {
            place: sorted(
                {unit_number(units, parameter.second or parameter.entry) for parameter in some}
            )
            for place, some in trained.items()
        }

    @property
    def units(self) -> list[int]:
        """Return the numbers of the shard units to which this stage adds gradients."""
        return sorted({unit for some in self._adds_to.values() for unit in some})

    def forward(self, place: str) -> None:
        """Record that the forward reaches the module `place`, and gather the module's weights if
        they are sharded."""
        self._hold(self.places, place, 1)

    def backward(self, place: str | None) -> None:
        """Record that the backward reaches the module `place`. At this time, the backward of all
        later modules (in the order of the forward) is complete. If `place` is None, the backward of
        all modules is complete."""
        assert self.gradients is not None, "a stage without gradients has no backward"
        if place is None:
            self.gradients.end()
            return
        if place in self._backwards:
            self._hold(self._backwards, place, -1)
        self.gradients.begin(self._adds_to[place])

    def finish(self) -> None:
        """Record that the backward of a microbatch has ended."""
        if self.gradients is not None:
            self.gradients.finish()

    def begin_step(self) -> None:
        """Discard the incomplete gradients of an interrupted step."""
        if self.gradients is not None:
            self.gradients.forget()

    def enter(self, place: str, x: Tensor) -> Tensor:
        """Call `self.forward(place)`, and return `x` as the input of the module `place`. When the
        backward has computed the gradient of the returned tensor, it calls `self.backward` for the
        module before `place`."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            self.forward(place)
            return x
        return _Enter.apply(x, self, place)

    def before(self, place: str) -> str | None:
        """Return the module before `place`; None for the first module."""
        here = self.places.index(place)
        return self.places[here - 1] if here else None

    def _hold(self, places: Sequence[str], place: str, step: int) -> None:
        if self.weights is not None:
            _, *ahead = at_hand(places, place, step)
            self.weights.hold(
                self._uses[place], [n for following in ahead for n in self._uses[following]]
            )


class _Enter(Function):
    """The identity function at the input of a module. Its forward runs before the module's forward,
    and its backward runs after the module's backward; both notify the `Walk`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, walk: Walk, place: str) -> Tensor:
        ctx.walk = walk
        ctx.place = place
        walk.forward(place)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.walk.backward(ctx.walk.before(ctx.place))
        return dy, None, None


def _placed(entry: Entry, flat: Tensor, start: int) -> Tensor:
    """Return a view of the parameter `entry` in `flat`, which has the elements of the flat buffer
    from position `start` on."""
    first = entry.start - start
    return flat[first : first + entry.elements].view(entry.shape)
