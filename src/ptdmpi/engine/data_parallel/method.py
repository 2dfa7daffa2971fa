"""The interface of data-parallel methods, which decide what the replicas of a model send to each
other, and when.

A method is one class with a few hooks. `leaf` is called when the gradient of one microbatch is
complete, `reduce` when the gradients of all microbatches are complete, and `after_update` after the
update. `differs` names the axes along which replicas need not be equal. `kinds` is the state that
the method stores for each parameter from step to step. The code for norms, skipped steps, memory,
validation and checkpoints uses only `differs` and `kinds`, so it works with every method.
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
    """The objects of one rank that a data-parallel method uses: the run's configuration, this
    rank's communicators and position in the grid, its parameters and gradients, its pipeline stages
    by number, and the schedule of a step."""

    config: Config
    axes: Axes
    buffer: ParameterBuffer
    stages: Mapping[int, Stage]
    schedule: Schedule


class DataParallel(OpHook):
    """A data-parallel method. With the base class itself, replicas exchange nothing: each replica
    trains on its own samples.

    `differs`: the axes of the process grid along which ranks may have different weights (and
    moments) for the same parameters. `differs` is ("replicate",), or () if all replicas are equal,
    bit by bit, after every step.

    `linear`: True if `reduce` only adds the gradients of ranks. Then `reduce` may run before the
    gradients are summed over the tensor axis and over the two uses of a tied embedding table. A
    method that does more than add, for example one that compresses, sets `linear` to False. The
    input of `reduce` is then this replica's gradients, already summed over its tensor ranks and,
    for a tied table, over the first and the last pipeline rank.

    `by_unit`: True if the method sums over all ranks that see different tokens. These ranks are the
    group `losses`, which may be larger than the group `data`. Such a method sums each shard unit
    (a group of parameters, see `model.flat`) separately. Some shard units declare axes along which
    their parameters differ (`apart`); the method does not sum over these axes. If a run needs
    separate sums for shard units, but `by_unit` of its method is False, the run is refused.

    `kinds`: the kinds of state, by name, that the method stores in addition to weights and moments.
    A kind of state has one number for every element of each parameter, in the type of the master
    weights. Each kind declares whether replicas have different values (`Kept.differs`), and its
    initial values. `ptdmpi.config.methods.kept_by` has the names of the kinds, for code that counts
    memory without an engine. The tensors are made together with the state:
    `self.state.kinds["error"].parts[n]` corresponds, element by element, to
    `self.replica.buffer.masters[n]`. Checkpoints contain these tensors, for each replica if
    replicas differ, so a resumed run gives bitwise the same results as an uninterrupted run.
    """

    differs: tuple[str, ...] = ()
    linear: bool = True
    by_unit: bool = False
    # average size, in bits per element, of the codes (compressed values) that this rank sent in the
    # last step; None if this rank sent no codes
    bits_per_element: float | None = None
    # the engine sets this attribute when it makes the state, which contains the method's `kinds`
    state: State

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.data = replica.axes["data"]
        self.kinds: Mapping[str, Kept] = {}

    def begin_step(self) -> None:
        """Prepare a step, before the gradients are set to zero and the first op (a forward of a
        stage) begins. An earlier step may have ended without a call of `reduce`, for example a step
        that only searched for values that are not finite. Discard the values that the method has
        stored in such a step."""

    def end(self, op: Op, microbatch: MicrobatchPass) -> None:
        """Call `leaf` if the gradient of a microbatch is complete after `op`. If the backward of a
        microbatch is split into several ops, the gradient is complete after the last of these ops.
        """
        if self.replica.schedule.completes_gradients(op):
            self.leaf(op.stage, op.microbatch)

    def leaf(self, stage: int, microbatch: int) -> None:
        """Use the gradient of one microbatch (number `microbatch` of this data rank, from 0). The
        engine calls `leaf` when this gradient has been added to the buffer. The gradients of later
        microbatches are added to the same elements of the buffer, so a method that needs this
        gradient alone must copy it during the call."""

    def reduce(self) -> None:
        """Replace the gradients of this data rank's microbatches, which are in the buffer, by the
        gradients that the update of this replica uses. Each gradient is already divided by the
        number of valid tokens (tokens that count in the loss) of the global batch, so the gradient
        of the global batch is the plain sum over data ranks."""

    def after_update(self, step: int, skipped: bool) -> None:
        """Do the method's work after step `step` (from 0). When this method is called, the
        optimizer has updated the master weights of this replica, or all replicas have `skipped` the
        step. The method may change the master weights, because they are copied to the weights only
        after the call."""

    @property
    def settled(self) -> bool:
        """Return True if all operations that change the state are complete. The engine may call
        this method at any time, even within a step."""
        return True

    def replicas_lost(self) -> None:
        """After a loss of ranks, recompute the state that depends on all replicas. After the loss
        there are fewer replicas, or some replicas are copies of other replicas. All ranks call this
        method."""

    def settle(self) -> None:
        """Finish all operations that have begun. All ranks call this method, between two steps."""

    def agreed(self, value: float) -> float:
        """Return the greatest `value`, such as a norm, over all replicas. The result is the same on
        all ranks. The result decides whether a step is skipped, so it is NaN if any value is
        NaN."""
        if not self.differs:
            return value  # equal replicas have the same `value`, so no message is needed
        values = [theirs for (theirs,) in self.data.all_gather_numbers([value])]
        if any(map(math.isnan, values)):
            return math.nan
        return max(values)
