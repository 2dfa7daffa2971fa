"""Communication of a stage while it computes: sharded gradients are reduced and sharded weights
gathered (`zero` = 2, 3), and all-reduces of gradients may begin early.

A stage notifies its `Walk` when it reaches each of its modules in the forward, in the backward, and
in recomputation. A module (`place`) is the embedding, a layer, or the head. Under `zero` = 3,
weights are gathered one module ahead and dropped after their module, whether they train or not.
Only frozen quantized matrices stay unsharded. Under `zero` = 2 and 3, the gradient of a module is
unsharded only while it is computed, and is then reduced to each rank's part (Rajbhandari et al.
2020, arXiv 1910.02054, sections 5.2 and 5.3).
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
    """A pool of flat tensors for unsharded units, which are reused for other units of the same
    length."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._spare: list[Tensor] = []

    def take(self, length: int) -> Tensor:
        """Return a flat tensor of `length` elements with arbitrary values. Spare tensors of other
        lengths are freed: the shard units that are not layers have different lengths, and their
        tensors would otherwise stay for the whole step."""
        fitting = [flat for flat in self._spare if len(flat) == length]
        self._spare = fitting[1:]
        if fitting:
            return fitting[0]
        return torch.empty(length, dtype=self.dtype, device=self.device)

    def give(self, flat: Tensor) -> None:
        """Give a tensor that is no longer used back to the pool."""
        self._spare = [flat]


class GatheredWeights:
    """The unsharded weights of the units that are gathered at present, for all stages of a rank.
    Units are numbered: first the units that train, then the frozen ones."""

    def __init__(self, buffer: ParameterBuffer, parameters: Sequence[Parameter]) -> None:
        self.buffer = buffer
        # two pools, because a pool keeps tensors of one length only, and a layer's adapters and its
        # frozen weights alternate
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
        """Return the numbers of the shard units that contain these parameters, in ascending
        order."""
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
        """Gather all shard units."""
        self.hold(range(len(self.units)), ())

    def hold(self, now: Sequence[int], ahead: Sequence[int]) -> None:
        """Gather the shard units `now`, begin to gather the units `ahead`, and drop all others."""
        for unit in self._there.keys() - {*now, *ahead}:
            self._drop(unit)
        for unit in (*now, *ahead):
            if unit not in self._there:
                self._gather(unit)
        for unit in now:
            self._there[unit][1].wait()

    def drop(self) -> None:
        """Drop all gathered units, because the weights have changed."""
        for unit in list(self._there):
            self._drop(unit)

    def _gather(self, number: int) -> None:
        unit, part = self._parts[number]
        flat = self._pool(number).take(unit.stop - unit.start)
        group = self.buffer.portion.group
        flat.view(group.size, -1)[group.rank].copy_(part)
        self._there[number] = flat, group.all_gather_in_place(flat)
        for parameter in self.units[number]:
            # Assign a new tensor with its own version counter: autograd keeps the parameter itself,
            # and would otherwise mistake the next gathering for a change of a saved tensor.
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
    """A receiver of the progress of the backward. The stage notifies it of the shard units for
    which gradients are computed."""

    def begin(self, numbers: Sequence[int]) -> None:
        """Record that gradients are now computed for these shard units, and for no others."""

    def end(self) -> None:
        """Record that the gradients of the units of the last `begin` are complete for this
        microbatch."""

    def finish(self) -> None:
        """Record that the backward of this microbatch has ended."""

    def forget(self) -> None:
        """Discard the incomplete gradients of an interrupted step."""

    def looked_at(
        self, look: Callable[[Parameter], None]
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients are not reduced before they have been read. `look`
        reads the gradients; gradients that stay in the buffer are read at the end of the op."""


class _Leaving(NamedTuple):
    """The unsharded gradient of a shard unit that is being reduced: the unit's number, its values,
    and the handle of the reduction."""

    number: int
    gradient: Tensor
    handle: Handle


class ReducedGradients:
    """The unsharded gradients of shard units while they are computed, and their reduction."""

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
        """Call `look` with each parameter when its `main_grad` has the full gradient of a
        microbatch on this rank, before it is reduced."""
        self._look = look
        try:
            yield
        finally:
            self._look = None

    def begin(self, numbers: Sequence[int]) -> None:
        """Provide memory for the gradients of these shard units, and of no others, which are
        computed next."""
        self.end()
        for number in numbers:
            unit = self.buffer.gradient_units[number]
            flat = self._open[number] = self.pool.take(unit.stop - unit.start).zero_()
            for parameter, entry in self.units[number]:
                parameter.main_grad = _placed(entry, flat, unit.start)

    def end(self) -> None:
        """Begin to reduce the gradients of the units of the last `begin`, which are complete for
        this microbatch."""
        self._arrived()
        for number, flat in self._open.items():
            for parameter, _ in self.units[number]:
                if self._look is not None:
                    self._look(parameter)
                # adding to the gradient later would be an error, which must raise
                del parameter.main_grad
            handle = self.buffer.portion.group.reduce_scatter_in_place(flat)
            self._leaving.append(_Leaving(number, flat, handle))
        self._open = {}
        # on some transports collectives are complete when they return: then free their memory now
        if all(handle.done() for _, _, handle in self._leaving):
            self._arrived()

    def finish(self) -> None:
        """Wait until all computed gradients have been added to this rank's part."""
        self.end()
        self._arrived()

    def forget(self) -> None:
        """Discard the gradients of an interrupted step that were not reduced. The group keeps
        unfinished reductions until they are complete; their memory is not used again."""
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
    """The modules (`places`) of one stage, in the order of its forward, and the communication at
    each.

    `parameters` are the parameters that each module uses. `weights` is None if weights are
    unsharded (`zero` < 3), `gradients` is None if nothing trains.
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
        # The backward does not reach modules before the first one that trains. The backward also
        # leaves out an embedding that consists of tables only, because the backward of a look-up
        # does not need their values.
        tables = all(len(parameter.shape) > 1 for parameter in parameters.get(EMBEDDING, ()))
        idle = itertools.takewhile(
            lambda place: not trained[place] or (place == EMBEDDING and tables), self.places
        )
        self._backwards = self.places[len(list(idle)) :]
        units = buffer.gradient_units
        # if weights are unsharded, only units that train: an exchange of their weights may still be
        # running
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
        """Return the numbers of the shard units that this stage adds gradients to."""
        return sorted({unit for some in self._adds_to.values() for unit in some})

    def forward(self, place: str) -> None:
        """Record that the forward reaches the module `place`, and communicate for it."""
        self._hold(self.places, place, 1)

    def backward(self, place: str | None) -> None:
        """Record that the backward reaches the module `place`, and has finished all modules that
        follow it in the forward. If `place` is None, the backward has finished all modules."""
        assert self.gradients is not None, "nothing trains"
        if place is None:
            self.gradients.end()
            return
        if place in self._backwards:
            self._hold(self._backwards, place, -1)
        self.gradients.begin(self._adds_to[place])

    def finish(self) -> None:
        """Record that the backward has ended."""
        if self.gradients is not None:
            self.gradients.finish()

    def begin_step(self) -> None:
        """Discard the incomplete gradients of an interrupted step."""
        if self.gradients is not None:
            self.gradients.forget()

    def enter(self, place: str, x: Tensor) -> Tensor:
        """Return `x` as the input of the module `place`, so that the forward reports when it enters
        the module, and the backward when it leaves it."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            self.forward(place)
            return x
        return _Enter.apply(x, self, place)

    def before(self, place: str) -> str | None:
        """Return the module before `place`; None for the first."""
        here = self.places.index(place)
        return self.places[here - 1] if here else None

    def _hold(self, places: Sequence[str], place: str, step: int) -> None:
        if self.weights is not None:
            _, *ahead = at_hand(places, place, step)
            self.weights.hold(
                self._uses[place], [n for following in ahead for n in self._uses[following]]
            )


class _Enter(Function):
    """An identity at the input of a module. The forward of this function runs before the module's
    forward, and its backward after the module's backward."""

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
    """Return the view of an entry in a flat tensor that begins at position `start` of the flat
    buffer."""
    first = entry.start - start
    return flat[first : first + entry.elements].view(entry.shape)
