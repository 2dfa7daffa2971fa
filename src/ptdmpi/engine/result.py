"""The results of one training step."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ptdmpi.base.traffic import Traffic
from ptdmpi.engine.loads import ExpertLoads
from ptdmpi.engine.noise import GradientNoise
from ptdmpi.model.output.losses import SummedLoss
from ptdmpi.plan.schedule.simulate import Span
from ptdmpi.watch.stopwatch import Stopwatch


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The results of a training step. `loss` and `grad_norm` are equal on all ranks.

    `loss` is the total loss: the sum of the means of all losses that train, in nats per valid token
    (token that counts in the loss) of the global batch. `losses` has the value of each loss, by
    name. `grad_norm` is the norm of the gradient before clipping. `skipped` is True if the loss or
    the gradient is not finite; then nothing was updated. `overflow` is True if the step was skipped
    and the loss scale of fp16 can still be reduced. `watch` records this rank's timeline.
    `compute_s` is the time of this rank's ops (forwards and backwards) in seconds, without the
    collectives inside the ops. `inside_s` has the time of the collectives inside the ops, in
    seconds, for each group of ranks. `traffic` counts the messages and bytes that this rank has
    sent.

    `consensus` and `noise` are None in steps in which the run does not measure these values.
    `consensus` is the distance between replicas, measured before replicas were averaged
    (`Replicas.consensus`). `noise` is the noise of gradients, estimated from the gradients of the
    data ranks. If values are compressed, `bits_per_element` is the size of this rank's compressed
    values, in bits per value; otherwise it is None. `loads` has the loads of the experts; it is
    None if the model has no experts.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float
    skipped: bool
    overflow: bool
    compute_s: float
    watch: Stopwatch | None = None
    inside_s: Mapping[str, float] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    losses: Mapping[str, SummedLoss] = field(default_factory=dict)
    consensus: float | None = None
    bits_per_element: float | None = None
    noise: GradientNoise | None = None
    loads: ExpertLoads | None = None

    @property
    def spans(self) -> list[Span]:
        """Return this rank's timeline. Call this method after the device has finished the step."""
        if self.watch is None:
            return []
        return self.watch.spans
