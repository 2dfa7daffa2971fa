"""The contract of data-parallel methods, which decide what the replicas of a model send, and when.

A method is one class with a few hooks. `leaf` is called when the gradient of one microbatch is
complete, `reduce` when all gradients are, and `after_update` after the update. `differs` names the
axes along which replicas need not be equal. `kinds` is the state that the method keeps for each
parameter from step to step. The code for norms, skipped steps, memory, validation and checkpoints
reads `differs` and `kinds` and does not know which method runs.
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
    """The objects that a method works on: the run's configuration, this rank's place in the grid,
    its parameters and gradients, its stages by number, and the schedule of a step."""

    config: Config
    axes: Axes
    buffer: ParameterBuffer
    stages: Mapping[int, Stage]
    schedule: Schedule


class DataParallel(OpHook):
    """A data-parallel method; in this base class each replica trains alone on its own samples.

    `differs`: the axes of the grid along which ranks may hold other weights (and moments) of the
    same parameters: ("replicate",), or () if all replicas are equal, bit by bit, after every step.

    `linear`: True if `reduce` may run before the sums over the tensor axis and the tied table. A
    method that does more than add (compresses, for example) sets False. It then receives the
    gradients of this replica alone, already summed over its tensor ranks, and over both ends of the
    pipeline for a tied table.

    `by_unit`: True if the method sums over all ranks that see other tokens, which are the group
    `losses` and not `data` alone. It sums unit by unit of the flat order, and not over the axes
    along which the parameters of a unit are declared to be `apart`. Other methods are refused if
    that makes a difference.

    `kinds`: the state that the method keeps of each parameter in addition to weights and moments,
    by name: one number of the masters' type for every element. Each kind says whether replicas hold
    the same values (`Kept.differs`), and the values at the beginning.
    `ptdmpi.config.methods.kept_by` has their names, for code that counts memory without an engine.
    They are made with the state: `self.state.kinds["error"].parts[n]` corresponds, element by
    element, to `self.replica.buffer.masters[n]`. Checkpoints contain them, those of each replica if
    they differ, and a resumed run continues with the same bits.
    """

    differs: tuple[str, ...] = ()
    linear: bool = True
    by_unit: bool = False
    # bits per element of what this rank compressed in the last step, if anything
    bits_per_element: float | None = None
    state: State  # set by the engine when it makes the state, which contains `kinds`

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.data = replica.axes["data"]
        self.kinds: Mapping[str, Kept] = {}

    def begin_step(self) -> None:
        """Forget the remains of a step that was not reduced, such as one that was only observed.
        Called before the gradients are set to zero and the first op begins."""

    def end(self, op: Op) -> None:
        """Call `leaf` if the gradient of a microbatch is complete: if its backward is split into
        several ops, after the last of them."""
        if self.replica.schedule.completes_gradients(op):
            self.leaf(op.stage, op.microbatch)

    def leaf(self, stage: int, microbatch: int) -> None:
        """Use the gradient of one microbatch (number `microbatch` of this data rank, from 0).
        Called when it is complete in the buffer, added to the values there; more may be added once
        this returns."""

    def reduce(self) -> None:
        """Replace the gradients of this data rank's microbatches in the buffer by those with which
        this replica updates. The former are already weighted by 1 / valid tokens of the global
        batch, so the gradient of the global batch is their plain sum over data ranks."""

    def after_update(self, step: int, skipped: bool) -> None:
        """Act after step `step` (from 0): the masters of this replica are updated, or all replicas
        have `skipped` it. The method may change masters here; the weights are updated from them
        afterwards."""

    @property
    def settled(self) -> bool:
        """Return True if no operation that changes the state is in progress, after a step or within
        one."""
        return True

    def replicas_lost(self) -> None:
        """Recompute the state that depends on all replicas, after ranks were lost. `state` is that
        of the survivors; there are fewer replicas, or some are copies. All ranks call it."""

    def settle(self) -> None:
        """Finish what is under way; all ranks call it, between two steps."""

    def agreed(self, value: float) -> float:
        """Return the greatest `value` of all replicas, such as a norm, on all ranks. If one value
        is NaN, return NaN, because the result decides whether a step is skipped."""
        if not self.differs:
            return value  # already equal: no message
        values = self.data.all_gather_object(value)
        if any(map(math.isnan, values)):
            return math.nan
        return max(values)
