"""The model of one rank, ready to train: stages, parameters, schedule, gradients, optimizer."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import torch
from torch import Tensor

from ptdmpi.base.traffic import Traffic
from ptdmpi.comm.communicator import Communicator
from ptdmpi.comm.queues import on_its_way
from ptdmpi.comm.world import Axes
from ptdmpi.config import Config, SharedInputError
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.config.sections import AVERAGE
from ptdmpi.engine.data_parallel import data_parallel
from ptdmpi.engine.data_parallel.method import DataParallel, Replica
from ptdmpi.engine.gradients import GradientReduction
from ptdmpi.engine.muon import names_of_kinds
from ptdmpi.engine.noise import GradientNoise, OwnGradient
from ptdmpi.engine.offload import storage_of, with_room
from ptdmpi.engine.optimizer import LossScale, Optimizer, learning_rate, require_groups
from ptdmpi.engine.replicas import Replicas
from ptdmpi.engine.runner import Runner
from ptdmpi.model.batch import Batch
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.flat import ALL, Portion
from ptdmpi.model.kernels import Kernels, compiler
from ptdmpi.model.kernels import compute_by as hand
from ptdmpi.model.kernels.choice import HostChoice
from ptdmpi.model.parameters import data_types
from ptdmpi.model.sharded import GatheredWeights, ReducedGradients, Walk
from ptdmpi.model.stage import TIED_NAME, Stage
from ptdmpi.model.state import Kept, State
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.model.transformer import Block
from ptdmpi.plan.layout.grid import DATA, LOSSES
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
    `traffic` is what this rank has sent in the step. `consensus`: how far replicas that differ were
    apart, before they were mixed (`Replicas.consensus`), in steps where that is asked for.
    `bits_per_element`: of this rank's codes, where gradients are compressed. `noise`: of data
    ranks' gradients, in steps where that is asked for; none where one is skipped."""

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
    consensus: float | None = None
    bits_per_element: float | None = None
    noise: GradientNoise | None = None

    @property
    def spans(self) -> list[Span]:
        """This rank's timeline, once its device is done with the step."""
        return [] if self.watch is None else self.watch.spans


@dataclass(frozen=True)
class Sums:
    """Losses in nats, summed over all data ranks' microbatches, and over how many: of tokens (or of
    samples that are classified), and of sentence orders; `right`: samples that were classified
    right."""

    loss: float = 0.0
    tokens: float = 0.0
    order_loss: float = 0.0
    orders: int = 0
    right: float = 0.0

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
        precision = data_types(config.precision.compute)
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
        # the sum of all alone is begun place by place: other methods have their state as one
        begun = config.data_parallel.method == "all_reduce" and axes[LOSSES].overlaps
        # one rank may be what is left of several: it takes their state as it stands
        shrinks = config.run.on_failure == "shrink"
        overlaps = begun and (axes[LOSSES].size > 1 or shrinks)
        buffer = partial(_buffer, self.stages, config, self.device, portion, overlaps)
        self.buffer = with_room(axes.world, config, buffer)
        self.buffer.initialise(config.run.seed, trained_alone=config.adapt.base != "")
        for stage in self.stages.values():
            stage.place_tables(model, self.device)
        _compile(config, self.stages, axes.world, self.device)
        self.program = _program(pipeline, self.schedule)
        self.runner = Runner(self.stages, pipeline, precision.compute, self.device)
        if portion.shards_gradients:
            self.runner.inside["shard"] = axes["shard"]
        _require_exact(config, axes)
        policy = _method(Replica(config, axes, self.buffer, self.stages, self.schedule))
        self.runner.hooks.append(policy)
        # a tied table on two ranks is one parameter: the first stage's counts
        tied = any(stage.tied for stage in self.stages.values())
        first = any(stage.first for stage in self.stages.values())
        borrowed = [TIED_NAME] if tied and not first else []
        held = partial(_state, config, self.buffer, borrowed, policy)
        self.state = policy.state = with_room(axes.world, config, held)
        self.state.settle = policy.settle
        self.reduction = GradientReduction(axes, self.buffer, self.stages, policy, borrowed)
        require_groups(config.optimizer, pipeline, self.buffer)
        self.optimizer = Optimizer(config.optimizer, self.state, axes["tensor"])
        self.loss_scale = LossScale(config.precision, self.state.counters)
        # how many steps the state has behind it; None while it is being changed
        self.steps_done: int | None = 0
        self.compute_by(None)

    def compute_by(self, choice: HostChoice | None) -> None:
        """Compute by the kernels that a run has settled on; None: by the usual ones."""
        self.kernels = Kernels(choice, PRECISIONS[self.config.precision.compute])
        for stage in self.stages.values():
            hand(stage, self.kernels)
        self.optimizer.compute_by(self.kernels)

    @property
    def policy(self) -> DataParallel:
        """The data-parallel method: the first step of the reduction."""
        return self.reduction.policy

    @property
    def replicas(self) -> Replicas:
        """This rank's replica of the model among the others."""
        return Replicas(self.config, self.axes["data"], self.state, self.reduction)

    def step(self, step: int, batches: Sequence[Batch]) -> StepResult:
        """One optimizer step (0-based `step`) on this data rank's microbatches."""
        watch, before = self.stopwatch(), self.axes.traffic()
        scale = self.loss_scale.value
        valid, orders = self.accumulate(step, batches, watch)
        with watch.span("reduce"):
            own = self.reduction.reduce(step)
        rate = learning_rate(self.config.optimizer, step, self.config.run.steps)
        with watch.span("optimizer"):
            # the norm, and so clipping, is of the gradients without fp16's loss scale
            self.optimizer.expect(scale)
            asked = self._arriving(*own, self.reduction.global_norm())
            # The one place of a step where the host waits for the device: what it decides now
            # needs loss and norm. Before the update, which must not run on what an abort has left.
            self.axes.settle()
            inside_s = self.runner.inside_s
            compute_s = watch.compute_s - sum(inside_s.values())
            *losses, norm = asked.tolist()
            mine = OwnGradient.of(losses.pop() / scale, batches) if own else None
            total, order_total, _ = self._summed(losses)
            loss = total / valid
            told = self.policy.agreed(norm)
            # every rank sees the same loss and norm, so every rank skips the same steps
            skipped = not (math.isfinite(loss) and math.isfinite(told))
            overflow = skipped and self.loss_scale.can_fall
            # from here on equal replicas send nothing: a rank updates as a whole or not at all,
            # and what survives the loss of another one is never half a step
            self.steps_done = None
            if not skipped:
                self.optimizer.step(rate, norm)
            apart = None if skipped else self.replicas.measured(step)
            self.policy.after_update(step, skipped)
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
            apart,
            self.policy.bits_per_element,
            None if mine is None or skipped else mine.noise(self.axes["data"], norm, valid),
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
        self.policy.begin_step()
        self.buffer.gradients.zero_()
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
            self.runner.run(schedule, _program(self.axes["pipeline"], schedule), self.stopwatch())
        asked = self._arriving()
        self.axes.settle()
        loss, order_loss, right = self._summed(asked.tolist())
        tokens, orders = self._valid_tokens(batches), self._valid_orders(batches)
        return Sums(loss, tokens, order_loss, orders, right)

    def _valid_tokens(self, batches: Sequence[Batch]) -> float:
        """Valid tokens (weights, where labels have some) of the global batch; equal on all
        ranks."""
        return sum(self.axes[LOSSES].all_gather_object(sum(batch.tokens for batch in batches)))

    def _valid_orders(self, batches: Sequence[Batch]) -> int:
        """Samples of the global batch that have a sentence order."""
        if not self.config.model.sentence_order:
            return 0
        return sum(self.axes[LOSSES].all_gather_object(sum(batch.orders for batch in batches)))

    def _arriving(self, *more: Tensor) -> Tensor:
        """The losses of this rank's microbatches in their order, then those of their sentence
        orders and their numbers of right answers, and `more`: on their way to the host by one
        copy."""
        last = self.stages.get(self.schedule.stages - 1)
        kept = [] if last is None else [last.losses, last.order_losses, last.right]
        found = [losses[i] for losses in kept for i in sorted(losses)]
        values = [*found, *more]
        return on_its_way(torch.stack(values)) if values else torch.empty(0)

    def _summed(self, losses: Sequence[float]) -> tuple[float, float, float]:
        """What counts as loss, the sentence orders' alone, and right answers, added up in order of
        the global batch's microbatches; `losses` are those of `_arriving`."""
        last_stage = self.schedule.stages - 1
        last = self.stages.get(last_stage)
        sums = (0.0, 0.0, 0.0)
        if last is not None:
            one, two = len(last.losses), len(last.losses) + len(last.order_losses)
            parts = (losses[:one], losses[one:two], losses[two:])
            every = self.axes[LOSSES].all_gather_object(parts)
            sums = _added(every, 0), _added(every, 1), _added(every, 2)
        # only the rank with the last stage has seen losses
        return self.axes["pipeline"].broadcast_object(sums, self.schedule.rank_of(last_stage))


def _method(replica: Replica) -> DataParallel:
    """Return the data-parallel method of a run. Raises SharedInputError, on all ranks, where it
    would sum gradients over the wrong ranks."""
    policy, axes = data_parallel(replica), replica.axes
    apart = any(unit.apart for unit in replica.buffer.units)
    more = axes[LOSSES].size > axes[DATA].size
    if any(axes.world.all_gather_object(apart or more)) and not policy.by_unit:
        raise SharedInputError(
            "this data_parallel.method takes the gradients of all parameters as one, over the data "
            'axis alone; legal here: "all_reduce"'
        )
    return policy


def _program(pipeline: Communicator, schedule: schedules.Schedule) -> Program:
    """This rank's part of a schedule, with its messages."""
    program = programs(schedule)[pipeline.rank]
    return post_early(program) if pipeline.posts_early else program


def _require_exact(config: Config, axes: Axes) -> None:
    """Raise SharedInputError if a run is to be reproducible whose wire does not keep the order of
    sums."""
    if config.run.reproducible and not axes.exact:
        raise SharedInputError(
            "run.reproducible = true needs sums in ascending rank order, which "
            f'comm.wire = "{config.comm.wire}" does not keep; legal: comm.wire = "mpi"'
        )


def _buffer(
    stages: Mapping[int, Stage],
    config: Config,
    device: torch.device,
    portion: Portion,
    overlaps: bool,
) -> ParameterBuffer:
    """The parameters of a rank's stages, and what these do where some of it is sharded; `overlaps`:
    sums over the data axis are begun place by place. Raises OSError where a file has no room."""
    # first stages first: of a tied table the embedding's use comes before the head's
    named = [one for stage in stages.values() for one in stage.named_logical_parameters()]
    tied = any(stage.tied for stage in stages.values())

    def unit_of(name: str) -> str:
        if tied and name == TIED_NAME and portion.shards_state:
            return name  # alone, so that both ends of the pipeline, and both uses, are cut alike
        apart = portion.shards_gradients or config.data_parallel.overlap or overlaps
        return place_of(name) if apart else ALL

    precision, storage = data_types(config.precision.compute), storage_of(config, device)
    buffer = ParameterBuffer(named, precision, device, portion, unit_of, storage=storage)
    if portion.shards_gradients:
        parameters = [parameter for _, parameter in named]
        weights = GatheredWeights(buffer, parameters) if portion.shards_weights else None
        if weights is not None:
            buffer.followers.append(weights.drop)
        gradients = ReducedGradients(buffer, parameters)
        for stage in stages.values():
            stage.walk = Walk(stage.parameters_by_place(), weights, gradients, buffer)
    return buffer


def _compile(
    config: Config, stages: Mapping[int, Stage], world: Communicator, device: torch.device
) -> None:
    """Have layers compiled when they are used first, where `run.compile` asks for it. Raises
    SharedInputError on all ranks where one of them cannot."""
    if not config.run.compile:
        return
    for rank, wanted in enumerate(world.all_gather_object(compiler.missing(device.type))):
        if wanted:
            raise SharedInputError(
                f"run.compile = true: rank {rank} has no {wanted}; legal: compile = false"
            )
    for block in (block for stage in stages.values() for block in stage.layers.values()):
        assert isinstance(block, Block)
        block.compiled_by(compiler.BACKEND)


def _state(
    config: Config, buffer: ParameterBuffer, borrowed: Sequence[str], policy: DataParallel
) -> State:
    """The state behind the parameters of a rank. Raises OSError where a file has no room for it."""
    names = names_of_kinds(config.optimizer, buffer)
    moments = {
        name: Kept(policy.differs, needed=True, names=names.get(name))
        if name != AVERAGE
        else Kept(policy.differs, begins="weights")
        for name in config.optimizer.moments
    }
    scales = config.precision.scales_loss
    kinds = {**moments, **policy.kinds}
    return State(buffer, kinds, borrowed, policy.differs, scales, policy.data)


def _added(every: Iterable[Sequence[Sequence[float]]], kind: int) -> float:
    """The sum of all ranks' losses of one kind, one after the other, in the same order on every
    layout."""
    total = 0.0
    for of_rank in every:
        for loss in of_rank[kind]:
            total += loss
    return total
