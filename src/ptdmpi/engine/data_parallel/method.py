"""The contract of data-parallel methods: what the replicas of a model tell each other, and when.

A method is one class with a few places to say something: when the gradient of one microbatch is
complete, when those of all are (`reduce`), after the update; as `differs`, along which axes the
replicas need not be equal; and as `kinds`, what it keeps of each parameter from step to step. Norm,
skipped steps, memory, validation and checkpoints ask it, and nobody else knows which method runs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ptdmpi.comm.world import Axes
from ptdmpi.config import Config
from ptdmpi.engine.runner import OpHook
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.stage import Stage
from ptdmpi.model.state import Kept, State
from ptdmpi.plan.schedule.ops import Op
from ptdmpi.plan.schedule.orders import Schedule


@dataclass(frozen=True)
class Replica:
    """What a method works on: the run's configuration, this rank's place, its parameters and
    gradients, its stages by number, and the schedule of a step."""

    config: Config
    axes: Axes
    buffer: ParameterBuffer
    stages: Mapping[int, Stage]
    schedule: Schedule


class DataParallel(OpHook):
    """A method; by itself each replica trains alone on its own samples.

    `differs`: the axes of the grid along which ranks may hold other weights (and moments) of the
    same parameters; ("replicate",) where there are any. () where all replicas are equal, to the
    bit, after every step.

    `linear`: whether `reduce` may run before the sums over the tensor axis and the tied table. A
    method that does anything but add (compresses, say) says False, and then sees the gradients
    that this replica would update with if it were alone: the same on every tensor rank, or at both
    ends of the pipeline, that holds the same parameter.

    `by_unit`: it sums over all ranks that see other tokens (the group `losses`, not `data` alone),
    and leaves out of it, unit by unit of the flat order, the axes along which parameters are
    declared to be `apart`. Other methods are refused where that makes a difference.

    `kinds`: what it keeps of each parameter besides weights and moments, each a number of the
    masters' type for every element, by name: whether replicas hold the same (`Kept.differs`), and
    what it begins with. `ptdmpi.config.methods.kept_by` has their names, for whoever counts memory
    without an engine. They are made with the state: `self.state.kinds["error"].parts[n]` stands
    element by element beside `self.replica.buffer.masters[n]`. Checkpoints have them, each
    replica's own where they differ, and a resumed run goes on with the same bits.
    """

    differs: tuple[str, ...] = ()
    linear: bool = True
    by_unit: bool = False
    # what this rank's codes of the last step had, where it has compressed any
    bits_per_element: float | None = None
    state: State  # from when it is made, with the kinds in it

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.data = replica.axes["data"]
        self.kinds: Mapping[str, Kept] = {}

    def begin_step(self) -> None:
        """The gradients are about to be set to zero, and the first op to begin. What is left of a
        step that was not reduced, such as one that was only looked at, is to be forgotten."""

    def end(self, op: Op) -> None:
        """Calls `leaf` where the gradient of a microbatch is complete: of a backward that is split
        into several ops, after the last of them."""
        if self.replica.schedule.completes_gradients(op):
            self.leaf(op.stage, op.microbatch)

    def leaf(self, stage: int, microbatch: int) -> None:
        """The gradient of one microbatch (of this data rank's, from 0) is complete in the buffer,
        added to what stands there. More may be added to it once this returns."""

    def reduce(self) -> None:
        """Turn the gradients in the buffer, of this data rank's microbatches, into those that this
        replica updates with. They are weighted by 1 / valid tokens of the global batch already, so
        the gradient of the global batch is their plain sum over data ranks."""

    def after_update(self, step: int, skipped: bool) -> None:
        """The masters have had step `step` (from 0) on this replica, or it was `skipped` by all of
        them. Whoever changes masters here has them followed by the weights: that comes next."""

    @property
    def settled(self) -> bool:
        """Whether nothing that changes the state is under way after a step, or within one."""
        return True

    def replicas_lost(self) -> None:
        """The state is what survivors of lost ranks have held, and replicas are fewer, or some are
        copies; all ranks call it. What was known of all replicas is to be known of these."""

    def settle(self) -> None:
        """Finish what is under way; all ranks call it, between two steps."""

    def agreed(self, value: float) -> float:
        """What every rank is told of a number that replicas may differ in, such as a norm: the
        greatest. It decides whether a step is skipped, so NaN outweighs all others."""
        if not self.differs:
            return value  # equal already: no message
        values = self.data.all_gather_object(value)
        return math.nan if any(map(math.isnan, values)) else max(values)
