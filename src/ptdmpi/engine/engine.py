"""The model of one rank, ready to train: stages, parameters, schedule, gradients, optimizer."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import torch
from torch import Tensor

from ptdmpi.base.traffic import Traffic
from ptdmpi.comm.world import Axes
from ptdmpi.config import Config, SharedInputError
from ptdmpi.engine.data_parallel import DataParallel, Replica, data_parallel
from ptdmpi.engine.gradients import GradientReduction
from ptdmpi.engine.offload import storage_of, with_room
from ptdmpi.engine.optimizer import MOMENTS, LossScale, Optimizer, learning_rate
from ptdmpi.engine.runner import Runner
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.flat import ALL, Portion
from ptdmpi.model.parameters import PRECISIONS
from ptdmpi.model.sharded import GatheredWeights, ReducedGradients, Walk
from ptdmpi.model.stage import TIED_NAME, Batch, Stage
from ptdmpi.model.state import State
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layout.stages import split_model
from ptdmpi.plan.schedule import orders as schedules
from ptdmpi.plan.schedule.places import place_of
from ptdmpi.plan.schedule.program import Program, post_early, programs
from ptdmpi.plan.schedule.simulate import Span
from ptdmpi.watch.stopwatch import Place, Stopwatch


@dataclass(frozen=True)
class StepResult:
    """`loss` in nats per valid token of the global batch, `grad_norm` before clipping; equal on all
    ranks. `skipped`: the loss or the gradient is not finite, so nothing was updated; `overflow`:
    that is fp16's, and a smaller loss scale may mend it. `watch` has this rank's timeline;
    `compute_s` of it went into its own ops, without the collectives in them (`inside_s`, by group).
    `order_loss`, part of `loss`: in nats per sentence order, where the model is asked for any.
    `traffic` is what this rank has sent in the step."""

    loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float
    skipped: bool
    overflow: bool
    watch: Stopwatch | None
    compute_s: float
    inside_s: Mapping[str, float]
    traffic: Traffic
    order_loss: float | None = None

    @property
    def spans(self) -> list[Span]:
        """This rank's timeline, once its device is done with the step."""
        return [] if self.watch is None else self.watch.spans


@dataclass(frozen=True)
class Sums:
    """Losses in nats, summed over all data ranks' microbatches, and over how many: of tokens, and
    of sentence orders."""

    loss: float = 0.0
    tokens: float = 0.0
    order_loss: float = 0.0
    orders: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        mine, more = astuple(self), astuple(other)
        return Sums(*(a + b for a, b in zip(mine, more, strict=True)))


class Engine:
    """Everything of a rank that a training step touches, save data, logs and checkpoints."""

    def __init__(
        self,
        config: Config,
        axes: Axes,
        vocab_size: int,
        device: torch.device | str = "cpu",
        place: Place | None = None,
    ) -> None:
        self.config, self.axes, self.vocab_size = config, axes, vocab_size
        self.place = Place() if place is None else place
        self.device = torch.device(device)
        model, pipeline = config.model, axes["pipeline"]
        precision = PRECISIONS[config.precision.compute]
        axis = TensorAxis(axes["tensor"], config.parallel.sequence_parallel)
        self.schedule = schedules.build(
            config.parallel.schedule, pipeline.size, config.parallel.virtual, config.microbatches
        )
        # by the schedule's own placement, so that no two places say which rank holds what
        first = config.layout.first_layers
        layers = split_model(model, vocab_size, self.schedule.placement, first=first)
        self.stages = {
            number: Stage(config, vocab_size, layers[number], axis)
            for number in self.schedule.stages_of(pipeline.rank)
        }
        portion = Portion(axis.rank, axis.size, config.parallel.zero, axes["shard"])
        buffer = partial(_buffer, self.stages, config, self.device, portion)
        self.buffer = with_room(axes.world, config, buffer)
        self.buffer.initialise(config.run.seed)
        for stage in self.stages.values():
            stage.place_tables(model, self.device)
        self.program = self._program(self.schedule)
        self.runner = Runner(self.stages, pipeline, precision.compute, self.device)
        if portion.sharded > 1:
            self.runner.inside["shard"] = axes["shard"]
        if config.run.reproducible and not axes.exact:
            raise SharedInputError(
                "run.reproducible = true needs sums in ascending rank order, which "
                f'comm.wire = "{config.comm.wire}" does not keep; legal: comm.wire = "mpi"'
            )
        replica = Replica(axes, self.buffer, self.stages, self.schedule)
        policy = data_parallel(config, replica)
        self.runner.hooks.append(policy)
        # a tied table on two ranks is one parameter: the first stage's counts
        tied = any(stage.tied for stage in self.stages.values())
        first = any(stage.first for stage in self.stages.values())
        borrowed = [TIED_NAME] if tied and not first else []
        scales = config.precision.scales_loss
        held = partial(State, self.buffer, MOMENTS, borrowed, policy.differs, scales)
        self.state = with_room(axes.world, config, held)
        self.reduction = GradientReduction(axes, self.buffer, self.stages, policy, borrowed)
        self.optimizer = Optimizer(config.optimizer, self.state)
        self.loss_scale = LossScale(config.precision, self.state.counters)
        # how many steps the state has behind it; None while it is being changed
        self.steps_done: int | None = 0

    @property
    def policy(self) -> DataParallel:
        """The data-parallel method: the first step of the reduction."""
        return self.reduction.policy

    def _program(self, schedule: schedules.Schedule) -> Program:
        axis = self.axes["pipeline"]
        program = programs(schedule)[axis.rank]
        return post_early(program) if axis.posts_early else program

    def step(self, step: int, batches: Sequence[Batch]) -> StepResult:
        """One optimizer step (0-based `step`) on this data rank's microbatches."""
        watch, before = self.stopwatch(), self.axes.traffic()
        scale = self.loss_scale.value
        valid, orders = self.accumulate(step, batches, watch)
        with watch.span("reduce"):
            self.reduction.reduce()
            total, order_total = self._summed_losses()
            loss = total / valid
        rate = learning_rate(self.config.optimizer, step, self.config.run.steps)
        with watch.span("optimizer"):
            # the norm, and so clipping, is of the gradients without fp16's loss scale
            self.optimizer.unscale(scale)
            norm = self.reduction.global_norm()
            # The one place of a step where the host waits for the device: what it decides now
            # needs loss and norm. Before the update, which must not run on what an abort has left.
            self.axes.clock.settle()
            inside_s = self.runner.inside_s
            compute_s = watch.compute_s - sum(inside_s.values())
            told = self.policy.agreed(float(norm))
            # every rank sees the same loss and norm, so every rank skips the same steps
            skipped = not (math.isfinite(loss) and math.isfinite(told))
            overflow = skipped and self.loss_scale.can_fall
            # from here on equal replicas send nothing: a rank updates as a whole or not at all,
            # and what survives the loss of another one is never half a step
            self.steps_done = None
            if not skipped:
                self.optimizer.step(rate, norm)
            self.policy.after_update(step)
            self.loss_scale.update(skipped)
            self.steps_done = step + 1
            # behind it: weights follow from masters, whoever goes on with these
            self.state.changed(self.optimizer.writes_weights and not self.policy.differs)
        return StepResult(
            loss,
            told,
            rate,
            scale,
            skipped,
            overflow,
            watch,
            compute_s,
            inside_s,
            self.axes.traffic().since(before),
            order_total / orders if orders else None,
        )

    def stopwatch(self) -> Stopwatch:
        """A new one for what this rank does, by the clock of its device."""
        return Stopwatch(self.axes["pipeline"].rank, self.place, self.axes.clock)

    def accumulate(
        self, step: int, batches: Sequence[Batch], watch: Stopwatch
    ) -> tuple[float, int]:
        """Forward and backward of all microbatches; this rank's sums are left in the buffer.

        Returns the valid tokens and the sentence orders of the global batch.
        """
        # counted before anything runs: gradients are weighted by 1 / valid as they arise, so that
        # microbatches with unequal numbers of tokens need no weights of their own in any sum
        # (a batch without any: its loss is 0, not 0 / 0)
        valid = self._valid_tokens(batches) or 1.0
        orders = self._valid_orders(batches)
        self.buffer.gradients.zero_()
        self.policy.begin_step()
        for stage in self.stages.values():
            # the step's loss is the mean over tokens plus the mean over sentence orders
            order_weight = valid / orders if orders else 0.0
            stage.begin_step(step, list(batches), self.loss_scale.value / valid, order_weight)
        self.runner.run(self.schedule, self.program, watch)
        return valid, orders

    def evaluate(self, batches: Sequence[Batch]) -> Sums:
        """The losses of all data ranks' `batches`, without training; equal on all ranks. `loss` is
        that of tokens alone, so that its exponential is a perplexity."""
        schedule = schedules.forwards(self.schedule, len(batches))
        for stage in self.stages.values():
            stage.begin_step(None, list(batches), 1.0)
        with torch.no_grad():
            self.runner.run(schedule, self._program(schedule), self.stopwatch())
        loss, order_loss = self._summed_losses()
        tokens, orders = self._valid_tokens(batches), self._valid_orders(batches)
        return Sums(loss, tokens, order_loss, orders)

    def _valid_tokens(self, batches: Sequence[Batch]) -> float:
        """Valid tokens (weights, where labels have some) of the global batch; equal on all
        ranks."""
        # in float64: float32 counts to 2^24 only, and large batches have more tokens
        mine = sum(
            float(batch.labels.numel() if batch.weights is None else batch.weights.double().sum())
            for batch in batches
        )
        return sum(self.axes["data"].all_gather_object(mine))

    def _valid_orders(self, batches: Sequence[Batch]) -> int:
        """Samples of the global batch that have a sentence order."""
        if not self.config.model.sentence_order:
            return 0
        orders = [batch.order for batch in batches if batch.order is not None]
        mine = sum(int((order >= 0).sum()) for order in orders)
        return sum(self.axes["data"].all_gather_object(mine))

    def _summed_losses(self) -> tuple[float, float]:
        """What counts as loss, and the sentence orders' alone, added up in order of the global
        batch's microbatches."""
        last_stage = self.schedule.stages - 1
        last = self.stages.get(last_stage)
        sums = (0.0, 0.0)
        if last is not None:
            mine = [_values(kept) for kept in (last.losses, last.order_losses)]
            every = self.axes["data"].all_gather_object(mine)
            sums = _added(tokens for tokens, _ in every), _added(orders for _, orders in every)
        # only the rank with the last stage has seen losses
        return self.axes["pipeline"].broadcast_object(sums, self.schedule.rank_of(last_stage))


def _buffer(
    stages: Mapping[int, Stage], config: Config, device: torch.device, portion: Portion
) -> ParameterBuffer:
    """The parameters of a rank's stages, and what these do where some of it is sharded. Raises
    OSError where a file has no room for them."""
    # first stages first: of a tied table the embedding's use comes before the head's
    named = [one for stage in stages.values() for one in stage.named_logical_parameters()]
    tied = any(stage.tied for stage in stages.values())

    def unit_of(name: str) -> str:
        if tied and name == TIED_NAME and portion.sharded:
            return name  # alone, so that both ends of the pipeline, and both uses, are cut alike
        return place_of(name) if portion.sharded > 1 else ALL

    precision, storage = PRECISIONS[config.precision.compute], storage_of(config, device)
    buffer = ParameterBuffer(named, precision, device, portion, unit_of, storage=storage)
    if portion.sharded > 1:
        parameters = [parameter for _, parameter in named]
        weights = GatheredWeights(buffer, parameters) if portion.sharded == 3 else None
        if weights is not None:
            buffer.followers.append(weights.drop)
        gradients = ReducedGradients(buffer, parameters)
        for stage in stages.values():
            stage.walk = Walk(stage.parameters_by_place(), weights, gradients, buffer)
    return buffer


def _values(losses: dict[int, Tensor]) -> list[float]:
    """The losses of one rank's microbatches, in their order, in nats."""
    # stacked, so that the host fetches them from the device at once
    return torch.stack([losses[i] for i in sorted(losses)]).double().tolist() if losses else []


def _added(parts: Iterable[list[float]]) -> float:
    """The sum of all ranks' losses, one after the other, in the same order on every layout."""
    total = 0.0
    for losses in parts:
        for loss in losses:
            total += loss
    return total
