"""Overlap of communication with the backward of the last microbatch: sums of gradients over ranks
begin before this backward ends.

The overlap needs a transport that makes progress during computation (`overlaps`). A shard unit is a
group of parameters of one module, such as a layer. The gradients of each unit are summed as soon as
they are complete, from the last unit to the first. The replicas execute the same program, so they
begin the same sums in the same order.
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
    """The sums over ranks of the gradients of all shard units. Each sum begins once per step, by a
    call of the function `begin` with two arguments: the gradients and the shard unit.
    """

    def __init__(self, replica: Replica, begin: Callable[[Tensor, Unit], Handle]) -> None:
        self.replica = replica
        self.sum_begin = begin
        self._open: Sequence[int] = ()
        self._last = False  # True during the backward that completes the gradients of a stage
        self._looking = False
        self._begun: dict[int, Handle] = {}
        self._units: dict[int, list[int]] = {}
        for number, stage in replica.stages.items():
            if stage.trained_parameters():
                stage.walk = Walk(stage.parameters_by_place(), None, self, replica.buffer)
                self._units[number] = stage.walk.units

    def enter(self, op: Op) -> None:
        """Record that `op` (the forward or the backward of a stage on one microbatch) will be
        computed next."""
        last = op.microbatch == self.replica.schedule.microbatches - 1
        complete = self.replica.schedule.completes_gradients(op)
        self._last = last and complete and not self._looking
        self._open = ()

    def leave(self, op: Op) -> None:
        """Begin the gradient sums of the stage of `op` that have not begun yet. This method is
        called right after `op` was computed."""
        if self._last:
            for unit in self._units.get(op.stage, ()):
                self._begin(unit)
        self._last = False

    def begin(self, numbers: Sequence[int]) -> None:
        """Record the numbers of the shard units whose gradients are computed next."""
        self.end()
        self._open = numbers

    def end(self) -> None:
        """Begin the gradient sums of the shard units whose gradients have just been computed."""
        if self._last:
            for unit in self._open:
                self._begin(unit)
        self._open = ()

    def finish(self) -> None:
        """Begin the gradient sums of the shard units whose gradients the backward has computed
        last."""
        self.end()

    def forget(self) -> None:
        """Do nothing. No sum is in progress, because `wait` was called before the gradients were
        set to zero."""

    @contextlib.contextmanager
    def looked_at(self, look: Callable[[Parameter], None]) -> Iterator[None]:
        """Return a context in which no sums begin. At the end of an op, the buffer therefore
        contains only this rank's own gradients, not sums over ranks. `look` is not called, because
        the caller tests the gradients at the end of each op."""
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
        """Begin the sums that have not begun, and wait until all are complete."""
        for unit in range(len(self.replica.buffer.gradient_units)):
            self._begin(unit)
        self.wait()

    def _begin(self, number: int) -> None:
        if number not in self._begun:
            unit = self.replica.buffer.gradient_units[number]
            gradients = self.replica.buffer.gradients[unit.start : unit.stop]
            self._begun[number] = self.sum_begin(gradients, unit)
