"""The interface of data-parallel methods, which decide what the replicas of a model send to each
other, and when.

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
from ptdmpi.model.batch import MicrobatchPass
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.stage import Stage
from ptdmpi.model.state import Kept, State
from ptdmpi.plan.schedule.ops import Op
from ptdmpi.plan.schedule.orders import Schedule


@dataclass(frozen=True)
class Replica:
    """The objects that a method works with: the run's configuration, this rank's position in the
    grid, its parameters and gradients, its stages by number, and the schedule of a step."""

    config: Config
    axes: Axes
    buffer: ParameterBuffer
    stages: Mapping[int, Stage]
    schedule: Schedule


class DataParallel(OpHook):
    """A data-parallel method. In this base class each replica trains alone on its own samples.

    `differs`: the axes of the grid along which ranks may have different weights (and moments) for
    the same parameters. `differs` is ("replicate",), or () if all replicas are equal, bit by bit,
    after every step.

    `linear`: True if `reduce` may run before the sums over the tensor axis and over the tied table.
    A method that does more than add (compresses, for example) sets False. With False, the input of
    `reduce` is the gradients of this replica only. These gradients are already summed over its
    tensor ranks and, for a tied table, over both ends of the pipeline.

    `by_unit`: True if the method sums over all ranks that see different tokens. These ranks are the
    group `losses`, not only `data`. A method with `by_unit` sums each shard unit separately, and
    leaves out the axes along which the parameters of the unit are declared to be `apart`. A run is
    refused if its method has no `by_unit` and summing by shard unit would give another result.

    `kinds`: the state, by name, that the method keeps for each parameter in addition to weights and
    moments: one number for every element, in the type of the master weights. Each kind says whether
    replicas have different values (`Kept.differs`), and which values it begins with.
    `ptdmpi.config.methods.kept_by` has the names, for code that counts memory without an engine.
    The tensors are made together with the state: `self.state.kinds["error"].parts[n]` corresponds,
    element by element, to `self.replica.buffer.masters[n]`. Checkpoints contain the method's
    tensors, for each replica if they differ, and a resumed run continues with the same bits.
    """

    differs: tuple[str, ...] = ()
    linear: bool = True
    by_unit: bool = False
    # bits per element of the values that this rank compressed in the last step; None if it
    # compressed nothing
    bits_per_element: float | None = None
    state: State  # set by the engine when it makes the state, which contains `kinds`

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.data = replica.axes["data"]
        self.kinds: Mapping[str, Kept] = {}

    def begin_step(self) -> None:
        """Discard the gradients of an earlier step that did not reduce them, for example because it
        was only observed. `begin_step` is called before the gradients are set to zero and the first
        op begins."""

    def end(self, op: Op, microbatch: MicrobatchPass) -> None:
        """Call `leaf` if the gradient of a microbatch is complete. If the backward of a microbatch
        is split into several ops, the gradient is complete after the last of them."""
        if self.replica.schedule.completes_gradients(op):
            self.leaf(op.stage, op.microbatch)

    def leaf(self, stage: int, microbatch: int) -> None:
        """Use the gradient of one microbatch (number `microbatch` of this data rank, from 0).
        `leaf` is called when the gradient has been added to the buffer; later ops may add more to
        the same elements."""

    def reduce(self) -> None:
        """Replace the gradients of this data rank's microbatches, which are in the buffer, by the
        gradients with which this replica updates. The inputs are already weighted by 1 / valid
        tokens of the global batch, so the gradient of the global batch is their plain sum over data
        ranks."""

    def after_update(self, step: int, skipped: bool) -> None:
        """Act after step `step` (from 0), when the master weights of this replica are updated, or
        all replicas have `skipped` the step. The method may change the master weights here; the
        weights are updated from them afterwards."""

    @property
    def settled(self) -> bool:
        """Return True if no operation that changes the state is incomplete, after a step or within
        one."""
        return True

    def replicas_lost(self) -> None:
        """Recompute the state that depends on all replicas, after ranks were lost. `state` belongs
        to the survivors; there are fewer replicas, or some are copies of others. All ranks call
        this."""

    def settle(self) -> None:
        """Finish all operations that have begun. All ranks call this, between two steps."""

    def agreed(self, value: float) -> float:
        """Return the greatest `value` over all replicas, such as a norm, on all ranks. If one value
        is NaN, return NaN, because the result decides whether a step is skipped."""
        if not self.differs:
            return value  # all replicas have the same value, so no message is needed
        values = self.data.all_gather_object(value)
        if any(map(math.isnan, values)):
            return math.nan
        return max(values)
