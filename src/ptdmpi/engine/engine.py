"""The model of one rank, ready for training: stages, parameters, schedule, gradients, optimizer."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ptdmpi.comm.communicator import Communicator
from ptdmpi.comm.queues import on_its_way
from ptdmpi.comm.world import Axes
from ptdmpi.config import Config
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.config.sections import AVERAGE
from ptdmpi.engine.corruption import Verification
from ptdmpi.engine.data_parallel import method_of
from ptdmpi.engine.data_parallel.method import DataParallel, Replica
from ptdmpi.engine.gradients import GradientReduction
from ptdmpi.engine.loads import Balance, ExpertLoads
from ptdmpi.engine.muon import names_of_kinds
from ptdmpi.engine.noise import OwnGradient
from ptdmpi.engine.offload import storage_of, with_room
from ptdmpi.engine.optimizer import LossScale, Optimizer, learning_rate, require_groups
from ptdmpi.engine.prepare import compiling
from ptdmpi.engine.prepare.legal import require_legal, require_same_parameters
from ptdmpi.engine.replicas import Replicas
from ptdmpi.engine.result import StepResult
from ptdmpi.engine.runner import Runner
from ptdmpi.engine.scales import ScaleHistory
from ptdmpi.model.batch import Microbatch, MicrobatchPass
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.experts.exchange import ExpertAxis
from ptdmpi.model.flat import ALL, Portion
from ptdmpi.model.kernels import Kernels
from ptdmpi.model.kernels import compute_by as hand
from ptdmpi.model.kernels.agreement import Choice, DeviceChoice
from ptdmpi.model.output.losses import (
    COUNT,
    TASK,
    TOTAL,
    SummedLoss,
    added,
    kinds_of,
    named,
    weights,
)
from ptdmpi.model.parameters import data_types
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.model.sharded import GatheredWeights, ReducedGradients, Walk
from ptdmpi.model.stage import TIED_NAME, Stage
from ptdmpi.model.state import Kept, State
from ptdmpi.model.tensor_parallel import TensorAxis
from ptdmpi.plan.layout.grid import CONTEXT, EXPERTS, LOSSES, PARAMETERS, SHARDS
from ptdmpi.plan.layout.stages import split_model
from ptdmpi.plan.schedule import orders as schedules
from ptdmpi.plan.schedule.places import place_of
from ptdmpi.plan.schedule.program import Program, post_early, programs
from ptdmpi.watch.stopwatch import Place, Stopwatch


class Engine:
    """All objects that one rank needs for a training step. Data, logs and checkpoints are not
    included."""

    def __init__(
        self,
        config: Config,
        axes: Axes,
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        place: Place | None = None,
    ) -> None:
        """Build this rank's part of the model. `place` records what this rank is doing; the
        heartbeat (a thread that monitors the ranks) reads it. Raise SharedInputError, on all ranks,
        if the configuration is not supported."""
        self.config = config
        self.axes = axes
        self.vocab_size = vocab_size
        self.place = Place() if place is None else place
        self.device = torch.device(device)
        require_legal(config, axes)
        pipeline = axes["pipeline"]
        self.schedule = schedules.build(
            config.parallel.schedule, pipeline.size, config.parallel.virtual, config.microbatches
        )
        self.context = ContextAxis(axes[CONTEXT], config.parallel.context_method)
        self.stages = _stages(config, axes, vocab_size, self.schedule, context=self.context)
        # the entry of `LOSS_KINDS` for each loss, by the name of the loss
        self.losses = kinds_of(config)
        self._of_output = [name for name, kind in self.losses.items() if not kind.of_routers]
        tensor = axes["tensor"]
        portion = Portion(tensor.rank, tensor.size, config.parallel.zero, axes[SHARDS])
        overlaps = _sums_early(config, axes)
        buffer = partial(_buffer, self.stages, config, self.device, portion, overlaps=overlaps)
        self.buffer = with_room(axes.world, config, buffer)
        self.buffer.initialise(config.run.seed, trained_alone=config.adapt.base != "")
        for stage in self.stages.values():
            stage.place_tables(config.model, self.device)
        compiling.compile_if_asked(config, self.stages, axes.world, self.device)
        self.program = _program(pipeline, self.schedule)
        self.runner = _runner(self.stages, config, axes, self.device)
        policy = method_of(
            Replica(config, axes, buffer=self.buffer, stages=self.stages, schedule=self.schedule)
        )
        self.runner.hooks.append(policy)
        borrowed = _borrowed(self.stages)
        held = partial(_state, config, self.buffer, borrowed, policy)
        self.state = policy.state = with_room(axes.world, config, held)
        self.state.settle = policy.settle
        self.reduction = GradientReduction(
            axes, self.buffer, self.stages, policy, borrowed=borrowed
        )
        require_groups(config.optimizer, axes[PARAMETERS], self.buffer)
        self.optimizer = Optimizer(
            config.optimizer, self.state, tensor, width_ratio=config.model.width_ratio
        )
        self.balance = Balance(config, axes, self.stages, self.state)
        self.scales = ScaleHistory(config.model, axes, self.stages, self.state)
        self.loss_scale = LossScale(config.precision, self.state.counters)
        self.verification = Verification(config.run.verify_every, self.state, axes)
        # training steps that the state includes; None while an update changes the state
        self.steps_done: int | None = 0
        self.compute_by(None)

    def compute_by(self, choice: Choice | None) -> None:
        """From now on, compute with the kernels that `choice` selects; None selects the default
        kernels."""
        precision = PRECISIONS[self.config.precision.compute]
        if isinstance(choice, DeviceChoice):
            self.kernels = Kernels(None, precision, triton=choice.triton)
        else:
            self.kernels = Kernels(choice, precision)
        for stage in self.stages.values():
            hand(stage, self.kernels)
        self.optimizer.compute_by(self.kernels)

    @property
    def policy(self) -> DataParallel:
        """Return the data-parallel method of the run."""
        return self.reduction.policy

    @property
    def replicas(self) -> Replicas:
        """Return this rank's view of the replicas of the model."""
        return Replicas(self.config, self.axes["data"], self.state, self.reduction)

    def step(self, step: int, batches: Sequence[Microbatch]) -> StepResult:
        """Do step `step` (from 0) on this data rank's microbatches; return its results."""
        watch = self.stopwatch()
        before = self.axes.traffic()
        loss_scale = self.loss_scale.value
        passes, counts, scale = self.accumulate(step, batches, watch)
        valid = counts[TASK] or 1.0
        self.verification.before_reduction(step)
        with watch.span("reduce"):
            own = self.reduction.reduce(step)
        rate = learning_rate(self.config.optimizer, step, self.config.run.steps)
        with watch.span("optimizer"):
            # divide the gradients by `scale` first, so that clipping uses the norm of the mean
            # loss's gradient
            self.optimizer.expect(scale)
            arriving = self._arriving(passes, *own, self.reduction.global_norm())
            counted = self.balance.sent()
            greatest = self.scales.sent()
            # the host waits for the device, because loss and norm decide whether the step is
            # skipped; `settle` raises an error if a failed connection has left wrong values
            self.axes.settle()
            inside_s = self.runner.inside_s
            compute_s = watch.compute_s - sum(inside_s.values())
            *values, norm = arriving.tolist()
            loads = self.balance.read(counted)
            mine = OwnGradient.of(values.pop() / scale, batches) if own else None
            sums = self._summed(values)
            if loads is not None:
                sums = loads.with_routers(sums, counts)
            loss = sums.pop(TOTAL) / valid
            agreed_norm = self.policy.agreed(norm)
            # loss and norm are the same on every rank, so all ranks skip the same steps
            skipped = not (math.isfinite(loss) and math.isfinite(agreed_norm))
            overflow = skipped and self.loss_scale.can_fall
            if not skipped:
                self.scales.update(greatest)
            consensus = self._update(step, rate, norm, skipped=skipped, loads=loads)
        noise = None
        if mine is not None and not skipped:
            noise = mine.noise(self.axes["data"], norm, valid)
        return StepResult(
            loss=loss,
            grad_norm=agreed_norm,
            learning_rate=rate,
            loss_scale=loss_scale,
            skipped=skipped,
            overflow=overflow,
            compute_s=compute_s,
            watch=watch,
            inside_s=inside_s,
            traffic=self.axes.traffic().since(before),
            losses=named(sums, counts),
            consensus=consensus,
            bits_per_element=self.policy.bits_per_element,
            noise=noise,
            loads=loads,
        )

    def _update(
        self, step: int, rate: float, norm: float, *, skipped: bool, loads: ExpertLoads | None
    ) -> float | None:
        """Update the state, unless the step is `skipped`. `norm` is the norm of the gradients.
        Return the consensus distance (of the replicas from their mean) if replicas may differ and
        the run measures this distance in this step; otherwise return None."""
        self.verification.before_update(step)
        # If replicas are equal, no message is sent from here to the end of the update. A rank
        # therefore updates its state completely or not at all. So if a rank is lost, the state of
        # the surviving ranks is never half updated.
        self.steps_done = None
        if not skipped:
            self.optimizer.step(rate, norm)
            if loads is not None:
                self.balance.update(loads, self.optimizer.writes_weights)
        consensus = None if skipped else self.replicas.measured(step)
        self.policy.after_update(step, skipped)
        self.loss_scale.update(skipped)
        self.steps_done = step + 1
        # copy the master weights to the weights after setting `steps_done`: if another rank is lost
        # during the copy, the surviving ranks can copy again
        self.state.changed(self.optimizer.writes_weights and not self.policy.differs)
        self.verification.after_update(step)
        return consensus

    def stopwatch(self) -> Stopwatch:
        """Return a new stopwatch for this rank, with the clock of its device."""
        return Stopwatch(self.axes["pipeline"].rank, self.place, self.axes.clock)

    def accumulate(
        self, step: int, batches: Sequence[Microbatch], watch: Stopwatch
    ) -> tuple[list[MicrobatchPass], dict[str, float], float]:
        """Run forward and backward of all microbatches. After the call, the buffer has the sum of
        the gradients of this rank's microbatches.

        Return three values: the microbatches, which have their losses if this rank has the last
        stage; the number of terms of each loss in the global batch, by name; and a factor. The
        gradients in the buffer are the gradients of the mean loss, multiplied by this factor. The
        factor is the loss scale of fp16. If the user has written the loss function, the factor is
        the loss scale times (number of terms of this loss / number of tokens).
        """
        # Count the terms first: each gradient is weighted by 1 / (valid tokens of the global batch)
        # when it is computed, so the gradients of microbatches with different numbers of tokens are
        # simply added. (The loss of a batch without valid tokens is 0, not 0 / 0.)
        counts = self._counts(batches)
        tokens = counts[TASK] or 1.0
        scale = self.loss_scale.value / tokens
        by_name = weights(counts, self.losses)
        passes = [
            MicrobatchPass(number=number, batch=batch, step=step, scale=scale, weights=by_name)
            for number, batch in enumerate(batches)
        ]
        self.policy.begin_step()
        self.scales.begin()
        self.optimizer.clear()
        self.runner.run(self.schedule, self.program, passes, watch)
        counts = self._with_own_count(counts, passes)
        return passes, counts, self.loss_scale.value * ((counts[TASK] or 1.0) / tokens)

    def evaluate(self, batches: Sequence[Microbatch]) -> dict[str, SummedLoss]:
        """Return the losses, by name, of the `batches` of all data ranks, without training. The
        losses are equal on all ranks. The loss named "task" contains no auxiliary loss, so for a
        language model the exponential of its mean is a perplexity."""
        schedule = schedules.forwards(self.schedule, len(batches))
        program = _program(self.axes["pipeline"], schedule)
        passes = [MicrobatchPass(number, batch) for number, batch in enumerate(batches)]
        self.scales.begin()
        with torch.no_grad():
            self.runner.run(schedule, program, passes, self.stopwatch())
        arriving = self._arriving(passes)
        self.axes.settle()
        sums = self._summed(arriving.tolist())
        return named(sums, self._with_own_count(self._counts(batches), passes))

    def _counts(self, batches: Sequence[Microbatch]) -> dict[str, float]:
        """Return the number of terms of each loss in the global batch, by name. The result is equal
        on all ranks."""
        length = self.config.model.seq_length // self.context.size
        if self.context.size > 1 and any(len(batch.inputs) != length for batch in batches):
            raise ValueError(f"inputs must have {length} positions, those of this context rank")
        mine = [sum(kind.count(batch) for batch in batches) for kind in self.losses.values()]
        every = self.axes[LOSSES].all_gather_numbers(mine)
        return {name: sum(each) for name, *each in zip(self.losses, *every, strict=True)}

    def _with_own_count(
        self, counts: dict[str, float], passes: Sequence[MicrobatchPass]
    ) -> dict[str, float]:
        """Return `counts`, the number of terms of each loss. If the user has written the loss
        function of the task, replace the count of this loss by the number that the function has
        returned; the host waits for this number."""
        if COUNT not in self.losses:
            return counts
        arriving = self._arriving(passes)
        self.axes.settle()
        return {**counts, TASK: self._summed(arriving.tolist())[COUNT]}

    def _arriving(self, passes: Sequence[MicrobatchPass], *more: Tensor) -> Tensor:
        """Begin to copy the losses of this rank's microbatches, and the tensors `more`, to the host
        in one copy. Return the host tensor: the total losses in the order of microbatches, then the
        losses by name, then `more`."""
        values = [*self._values(passes), *more]
        if not values:
            return torch.empty(0)
        return on_its_way(torch.stack(values))

    def _values(self, passes: Sequence[MicrobatchPass]) -> Iterator[Tensor]:
        if self.schedule.stages - 1 not in self.stages:
            return
        for microbatch in passes:
            assert microbatch.total is not None, "the last stage computes the total loss"
            yield microbatch.total
        for name in self._of_output:
            for microbatch in passes:
                yield microbatch.losses[name]

    def _summed(self, values: Sequence[float]) -> dict[str, float]:
        """Return the total loss and the losses by name, each summed in the order of the global
        batch's microbatches. `values` are the losses that `_arriving` has copied to the host, in
        the order of `_values`."""
        last_stage = self.schedule.stages - 1
        names = (TOTAL, *self._of_output)
        sums = [0.0] * len(names)
        # only the pipeline rank with the last stage has losses
        if last_stage in self.stages:
            every = self.axes[LOSSES].all_gather_numbers(values)
            each = len(values) // len(names)
            sums = [added(every, slice(n * each, (n + 1) * each)) for n in range(len(names))]
        sums = self.axes["pipeline"].broadcast_numbers(sums, self.schedule.rank_of(last_stage))
        return dict(zip(names, sums, strict=True))


def _stages(
    config: Config,
    axes: Axes,
    vocab_size: int,
    schedule: schedules.Schedule,
    *,
    context: ContextAxis,
) -> dict[int, Stage]:
    """Return the pipeline stages that the schedule assigns to this rank: number of the stage ->
    stage. Raise SharedInputError, on all ranks, if ranks have declared different parameters."""
    axis = TensorAxis(axes["tensor"], config.parallel.sequence_parallel)
    layout = config.layout
    by_source = layout.computes_by_source(layout.microbatches(config.batch.global_size))
    experts = ExpertAxis(axes[EXPERTS], layout.dealing.whole, by_source)
    layers = split_model(
        config.model, vocab_size, schedule.placement, first=config.layout.first_layers
    )
    stages = {
        number: Stage(config, vocab_size, layers[number], axis, context=context, experts=experts)
        for number in schedule.stages_of(axes["pipeline"].rank)
    }
    require_same_parameters(axes, stages)
    return stages


def _sums_early(config: Config, axes: Axes) -> bool:
    """Return True if the all-reduces of gradients begin before the last backward of a step ends.
    Each module must then be a separate shard unit (a group of parameters whose gradients one
    all-reduce sums). The result is True only for the data-parallel method `all_reduce`."""
    if config.data_parallel.method != "all_reduce" or not axes[LOSSES].overlaps:
        return False
    # with on_failure = "shrink" a single rank may be the last survivor of several ranks; it
    # continues with their state, so it needs the same shard units
    return axes[LOSSES].size > 1 or config.run.on_failure == "shrink"


def _borrowed(stages: Mapping[int, Stage]) -> list[str]:
    """Return the names of this rank's parameters that another rank counts in the gradient norm.
    There is such a parameter only if a tied embedding table is on two ranks: the first stage counts
    the table, and the last stage does not."""
    tied = any(stage.tied for stage in stages.values())
    first = any(stage.first for stage in stages.values())
    if tied and not first:
        return [TIED_NAME]
    return []


def _program(pipeline: Communicator, schedule: schedules.Schedule) -> Program:
    """Return this rank's program: its ops (forwards and backwards of its stages on microbatches) in
    the order of the schedule, with the sends and receives inserted."""
    program = programs(schedule)[pipeline.rank]
    if pipeline.posts_early:
        return post_early(program)
    return program


def _runner(
    stages: Mapping[int, Stage], config: Config, axes: Axes, device: torch.device
) -> Runner:
    """Return the runner, which executes the ops of `stages`. The runner also measures the time of
    the messages that ops send on the context axis, on the expert axis and, if gradients are
    sharded, in the shard group.
    """
    compute = data_types(config.precision.compute).compute
    runner = Runner(stages, axes["pipeline"], compute, device)
    runner.time_inside(CONTEXT, axes[CONTEXT])
    runner.time_inside(EXPERTS, axes[EXPERTS])
    if config.layout.shards_gradients:
        runner.time_inside("shard", axes[SHARDS])
    return runner


def _buffer(
    stages: Mapping[int, Stage],
    config: Config,
    device: torch.device,
    portion: Portion,
    *,
    overlaps: bool,
) -> ParameterBuffer:
    """Return the buffer for the parameters of a rank's stages. If gradients are sharded, also give
    each stage an object that gathers weights and reduces gradients during the forward and backward.
    If `overlaps` is True, each module is a separate shard unit. Raise OSError if the disk has no
    space for a file."""
    # list the parameters of the first stage first, so that the first use of a tied table is the
    # embedding, and the second use is the head
    named = [weight for stage in stages.values() for weight in stage.named_logical_parameters()]
    tied = any(stage.tied for stage in stages.values())

    def unit_of(name: str) -> str:
        """Return the name of the shard unit to which a parameter belongs."""
        if tied and name == TIED_NAME and portion.shards_state:
            # a tied table is a separate shard unit, so that its two copies, which may be on two
            # ranks, are sharded equally
            return name
        if portion.shards_gradients or config.data_parallel.overlap or overlaps:
            return place_of(name)
        return ALL

    precision = data_types(config.precision.compute)
    storage = storage_of(config, device)
    buffer = ParameterBuffer(named, precision, device, portion, unit_of=unit_of, storage=storage)
    if portion.shards_gradients:
        parameters = [parameter for _, parameter in named]
        weights: GatheredWeights | None = None
        if portion.shards_weights:
            weights = GatheredWeights(buffer, parameters)
            buffer.followers.append(weights.drop)
        gradients = ReducedGradients(buffer, parameters)
        for stage in stages.values():
            stage.walk = Walk(stage.parameters_by_place(), weights, gradients, buffer)
    return buffer


def _state(
    config: Config, buffer: ParameterBuffer, borrowed: Sequence[str], policy: DataParallel
) -> State:
    """Return the state of a rank: the weights, and all other values that the optimizer and the
    data-parallel method store. Raise OSError if the disk has no space for a file."""
    names = names_of_kinds(config.optimizer, buffer)
    moments = {
        name: Kept(policy.differs, needed=True, names=names.get(name))
        for name in config.optimizer.moments
    }
    if AVERAGE in moments:
        moments[AVERAGE] = Kept(policy.differs, begins="weights")
    return State(
        buffer,
        {**moments, **policy.kinds},
        borrowed,
        differs=policy.differs,
        scales_loss=config.precision.scales_loss,
        delays_scales=config.precision.scaling == "delayed",
        peers=policy.data,
    )
