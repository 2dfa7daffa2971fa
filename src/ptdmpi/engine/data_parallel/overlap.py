"""Sums over the data axis that begin while the last backward is still under way.

They need a wire that makes progress in the meantime (`overlaps`). Every unit of the flat order, a
place of the model such as a layer, is summed as soon as its gradient is complete, in reverse order.
The replicas execute the same program, so they begin the same sums in the same order.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ptdmpi.comm.communicator import Handle
from ptdmpi.engine.data_parallel.method import Replica
from ptdmpi.model.flat import Unit
from ptdmpi.model.parameters import Parameter
from ptdmpi.model.sharded import Walk
from ptdmpi.plan.schedule.ops import Op


class BegunSums:
    """The sums of all units of a rank. Each begins once in a step, by a call of `begin` with the
    gradients and the unit."""

    def __init__(self, replica: Replica, begin: Callable[[Tensor, Unit], Handle]) -> None:
        self.replica = replica
        self.sum_begin = begin
        self._open: Sequence[int] = ()
        self._last = False  # True in the backward that completes gradients
        self._looking = False
        self._begun: dict[int, Handle] = {}
        self._units: dict[int, list[int]] = {}
        for number, stage in replica.stages.items():
            if stage.trained_parameters():
                stage.walk = Walk(stage.parameters_by_place(), None, self, replica.buffer)
                self._units[number] = stage.walk.units

    def enter(self, op: Op) -> None:
        """Note that `op` is about to be computed."""
        last = op.microbatch == self.replica.schedule.microbatches - 1
        complete = self.replica.schedule.completes_gradients(op)
        self._last = last and complete and not self._looking
        self._open = ()

    def leave(self, op: Op) -> None:
        """Begin the sums of the stage of `op` that have not begun; called after `op` was
        computed."""
        if self._last:
            for unit in self._units.get(op.stage, ()):
                self._begin(unit)
        self._last = False

    def begin(self, numbers: Sequence[int]) -> None:
        """Note the units whose gradients are being computed."""
        self.end()
        self._open = numbers

    def end(self) -> None:
        """Begin the sums of the units that were being computed."""
        if self._last:
            for unit in self._open:
                self._begin(unit)
        self._open = ()

    def finish(self) -> None:
        """Begin the sums of the last units."""
        self.end()

    def forget(self) -> None:
        """Do nothing: `wait` was called before the gradients were set to zero."""

    @contextlib.contextmanager
    def looked_at(self, look: Callable[[Parameter], None]) -> Iterator[None]:
        """Begin no sums within the context, so that the gradients at the end of an op are this
        rank's."""
        self._looking = True
        try:
            yield
        finally:
            self._looking = False

    def wait(self) -> None:
        """Wait for all sums that have begun."""
        for handle in self._begun.values():
            handle.wait()
        self._begun = {}

    def complete(self) -> None:
        """Begin the sums that have not begun, and wait for all units."""
        for unit in range(len(self.replica.buffer.gradient_units)):
            self._begin(unit)
        self.wait()

    def _begin(self, number: int) -> None:
        if number not in self._begun:
            unit = self.replica.buffer.gradient_units[number]
            gradients = self.replica.buffer.gradients[unit.start : unit.stop]
            self._begun[number] = self.sum_begin(gradients, unit)
