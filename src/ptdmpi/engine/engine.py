"""The model of one rank, ready to train: stages, parameters, schedule, gradients, optimizer."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from ptdmpi.model.batch import Batch, MicrobatchPass
from ptdmpi.model.buffer import ParameterBuffer
from ptdmpi.model.flat import ALL, Portion
from ptdmpi.model.kernels import Kernels, compiler
from ptdmpi.model.kernels import compute_by as hand
from ptdmpi.model.kernels.choice import HostChoice
from ptdmpi.model.output.losses import TASK, SummedLoss, kinds_of, weights
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

TOTAL = "total"  # what trains: the weighted sum of all losses


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What came of a step; `loss` and `grad_norm` are equal on all ranks.

    `loss`: in nats per valid token of the global batch, the sum of the means of all losses that
    train; `losses`: each of them by name. `grad_norm`: before clipping. `skipped`: the loss or the
    gradient is not finite, so nothing was updated; `overflow`: that is fp16's, and a smaller loss
    scale may mend it. `watch` has this rank's timeline; `compute_s` of it went into its own ops,
    without the collectives in them (`inside_s`, by group). `traffic`: what this rank has sent.

    In steps that measure them: `consensus`, how far apart replicas that differ were before they
    were mixed (`Replicas.consensus`), and `noise`, that of the data ranks' gradients.
    `bits_per_element`: of this rank's codes, if gradients are compressed.
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

    @property
    def spans(self) -> list[Span]:
        """This rank's timeline, once its device is done with the step."""
        return [] if self.watch is None else self.watch.spans


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
        """`place` says where the rank is for whoever watches it. Raises SharedInputError, on all
        ranks, where the configuration asks for what this layout or machine cannot do."""
        self.config = config
        self.axes = axes
        self.vocab_size = vocab_size
        self.place = Place() if place is None else place
        self.device = torch.device(device)
        _require_exact(config, axes)
        pipeline = axes["pipeline"]
        self.schedule = schedules.build(
            config.parallel.schedule, pipeline.size, config.parallel.virtual, config.microbatches
        )
        self.stages = _stages(config, axes, vocab_size, self.schedule)
        self.losses = kinds_of(config.model)  # by name
        tensor = axes["tensor"]
        portion = Portion(tensor.rank, tensor.size, config.parallel.zero, axes["shard"])
        overlaps = _sums_early(config, axes)
        buffer = partial(_buffer, self.stages, config, self.device, portion, overlaps=overlaps)
        self.buffer = with_room(axes.world, config, buffer)
        self.buffer.initialise(config.run.seed, trained_alone=config.adapt.base != "")
        for stage in self.stages.values():
            stage.place_tables(config.model, self.device)
        _compile(config, self.stages, axes.world, self.device)
        self.program = _program(pipeline, self.schedule)
        compute = data_types(config.precision.compute).compute
        self.runner = Runner(self.stages, pipeline, compute, self.device)
        if portion.shards_gradients:
            self.runner.inside["shard"] = axes["shard"]
        policy = _method(Replica(config, axes, self.buffer, self.stages, self.schedule))
        self.runner.hooks.append(policy)
        borrowed = _borrowed(self.stages)
        held = partial(_state, config, self.buffer, borrowed, policy)
        self.state = policy.state = with_room(axes.world, config, held)
        self.state.settle = policy.settle
        self.reduction = GradientReduction(axes, self.buffer, self.stages, policy, borrowed)
        require_groups(config.optimizer, pipeline, self.buffer)
        self.optimizer = Optimizer(config.optimizer, self.state, tensor)
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
        watch = self.stopwatch()
        before = self.axes.traffic()
        scale = self.loss_scale.value
        counts, passes = self.accumulate(step, batches, watch)
        valid = counts[TASK] or 1.0
        with watch.span("reduce"):
            own = self.reduction.reduce(step)
        rate = learning_rate(self.config.optimizer, step, self.config.run.steps)
        with watch.span("optimizer"):
            # the norm, and so clipping, is of the gradients without fp16's loss scale
            self.optimizer.expect(scale)
            arriving = self._arriving(passes, *own, self.reduction.global_norm())
            # The one place of a step where the host waits for the device: what it decides now
            # needs loss and norm. Before the update, which must not run on what an abort has left.
            self.axes.settle()
            inside_s = self.runner.inside_s
            compute_s = watch.compute_s - sum(inside_s.values())
            *values, norm = arriving.tolist()
            mine = OwnGradient.of(values.pop() / scale, batches) if own else None
            sums = self._summed(values)
            loss = sums.pop(TOTAL) / valid
            agreed_norm = self.policy.agreed(norm)
            # every rank sees the same loss and norm, so every rank skips the same steps
            skipped = not (math.isfinite(loss) and math.isfinite(agreed_norm))
            overflow = skipped and self.loss_scale.can_fall
            # from here on equal replicas send nothing: a rank updates as a whole or not at all,
            # and what survives the loss of another one is never half a step
            self.steps_done = None
            if not skipped:
                self.optimizer.step(rate, norm)
            consensus = None if skipped else self.replicas.measured(step)
            self.policy.after_update(step, skipped)
            self.loss_scale.update(skipped)
            self.steps_done = step + 1
            # after it: weights follow from masters, whoever goes on with these
            self.state.changed(self.optimizer.writes_weights and not self.policy.differs)
        noise = None
        if mine is not None and not skipped:
            noise = mine.noise(self.axes["data"], norm, valid)
        return StepResult(
            loss=loss,
            grad_norm=agreed_norm,
            learning_rate=rate,
            loss_scale=scale,
            skipped=skipped,
            overflow=overflow,
            compute_s=compute_s,
            watch=watch,
            inside_s=inside_s,
            traffic=self.axes.traffic().since(before),
            losses=_named(sums, counts),
            consensus=consensus,
            bits_per_element=self.policy.bits_per_element,
            noise=noise,
        )

    def stopwatch(self) -> Stopwatch:
        """A new one for what this rank does, by the clock of its device."""
        return Stopwatch(self.axes["pipeline"].rank, self.place, self.axes.clock)

    def accumulate(
        self, step: int, batches: Sequence[Batch], watch: Stopwatch
    ) -> tuple[dict[str, float], list[MicrobatchPass]]:
        """Forward and backward of all microbatches; this rank's sums are left in the buffer.

        Returns how many of the global batch each loss counts, by name, and the microbatches, with
        their losses where this rank has the last stage.
        """
        # counted before anything runs: gradients are weighted by 1 / valid as they arise, so that
        # microbatches with unequal numbers of tokens need no weights of their own in any sum
        # (a batch without any: its loss is 0, not 0 / 0)
        counts = self._counts(batches)
        scale = self.loss_scale.value / (counts[TASK] or 1.0)
        by_name = weights(counts)
        passes = [
            MicrobatchPass(number, batch, step, scale, by_name)
            for number, batch in enumerate(batches)
        ]
        self.policy.begin_step()
        self.buffer.gradients.zero_()
        self.runner.run(self.schedule, self.program, passes, watch)
        return counts, passes

    def evaluate(self, batches: Sequence[Batch]) -> dict[str, SummedLoss]:
        """The losses of all data ranks' `batches` by name, without training; equal on all ranks.
        The task's is that of tokens alone, so that the exponential of its mean is a perplexity."""
        schedule = schedules.forwards(self.schedule, len(batches))
        program = _program(self.axes["pipeline"], schedule)
        passes = [MicrobatchPass(number, batch) for number, batch in enumerate(batches)]
        with torch.no_grad():
            self.runner.run(schedule, program, passes, self.stopwatch())
        arriving = self._arriving(passes)
        self.axes.settle()
        sums = self._summed(arriving.tolist())
        return _named(sums, self._counts(batches))

    def _counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """How many of the global batch each loss is a sum over, by name; equal on all ranks."""
        mine = {
            name: sum(kind.count(batch) for batch in batches) for name, kind in self.losses.items()
        }
        every = self.axes[LOSSES].all_gather_object(mine)
        return {name: sum(counts[name] for counts in every) for name in self.losses}

    def _arriving(self, passes: Sequence[MicrobatchPass], *more: Tensor) -> Tensor:
        """The total losses of this rank's microbatches in their order, then those by name, and
        `more`: on their way to the host by one copy."""
        values = [*self._values(passes), *more]
        return on_its_way(torch.stack(values)) if values else torch.empty(0)

    def _values(self, passes: Sequence[MicrobatchPass]) -> Iterator[Tensor]:
        if self.schedule.stages - 1 not in self.stages:
            return
        for microbatch in passes:
            assert microbatch.total is not None, "the last stage has left it"
            yield microbatch.total
        for name in self.losses:
            for microbatch in passes:
                yield microbatch.losses[name]

    def _summed(self, values: Sequence[float]) -> dict[str, float]:
        """The total loss and those by name, added up in order of the global batch's microbatches;
        `values` are those of `_values`."""
        last_stage = self.schedule.stages - 1
        sums: dict[str, float] = {}
        if last_stage in self.stages:
            names = (TOTAL, *self.losses)
            each = len(values) // len(names)
            mine = {name: values[n * each : (n + 1) * each] for n, name in enumerate(names)}
            every = self.axes[LOSSES].all_gather_object(mine)
            sums = {name: _added(every, name) for name in names}
        # only the rank with the last stage has seen losses
        return self.axes["pipeline"].broadcast_object(sums, self.schedule.rank_of(last_stage))


def _named(sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, SummedLoss]:
    """The losses of which there are any, by name; the task's always."""
    return {
        name: SummedLoss(sums[name], count)
        for name, count in counts.items()
        if count or name == TASK
    }


def _require_exact(config: Config, axes: Axes) -> None:
    """Raise SharedInputError if a run is to be reproducible and its wire's sums are not."""
    if config.run.reproducible and not axes.exact:
        raise SharedInputError(
            "run.reproducible = true needs sums in ascending rank order, which "
            f'comm.wire = "{config.comm.wire}" does not keep; legal: comm.wire = "mpi"'
        )


def _stages(
    config: Config, axes: Axes, vocab_size: int, schedule: schedules.Schedule
) -> dict[int, Stage]:
    """The stages of this rank by number, as the schedule places them, so that no two places say
    which rank holds what."""
    axis = TensorAxis(axes["tensor"], config.parallel.sequence_parallel)
    layers = split_model(
        config.model, vocab_size, schedule.placement, first=config.layout.first_layers
    )
    return {
        number: Stage(config, vocab_size, layers[number], axis)
        for number in schedule.stages_of(axes["pipeline"].rank)
    }


def _sums_early(config: Config, axes: Axes) -> bool:
    """Whether sums of gradients are begun place by place: the sum of all alone, for other methods
    have their state as one."""
    if config.data_parallel.method != "all_reduce" or not axes[LOSSES].overlaps:
        return False
    # one rank may be what is left of several: it takes their state as it stands
    return axes[LOSSES].size > 1 or config.run.on_failure == "shrink"


def _borrowed(stages: Mapping[int, Stage]) -> list[str]:
    """The names of this rank's parameters that another rank counts: a tied table on two ranks is
    one parameter, the first stage's."""
    tied = any(stage.tied for stage in stages.values())
    first = any(stage.first for stage in stages.values())
    return [TIED_NAME] if tied and not first else []


def _method(replica: Replica) -> DataParallel:
    """Return the data-parallel method of a run. Raises SharedInputError, on all ranks, where it
    would sum gradients over the wrong ranks."""
    policy = data_parallel(replica)
    axes = replica.axes
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


def _buffer(
    stages: Mapping[int, Stage],
    config: Config,
    device: torch.device,
    portion: Portion,
    *,
    overlaps: bool,
) -> ParameterBuffer:
    """The parameters of a rank's stages, and what these do where some of it is sharded; `overlaps`:
    sums over the data axis are begun place by place. Raises OSError where a file has no room."""
    # first stages first: of a tied table the embedding's use comes before the head's
    named = [weight for stage in stages.values() for weight in stage.named_logical_parameters()]
    tied = any(stage.tied for stage in stages.values())

    def unit_of(name: str) -> str:
        if tied and name == TIED_NAME and portion.shards_state:
            return name  # alone, so that both ends of the pipeline, and both uses, are cut alike
        apart = portion.shards_gradients or config.data_parallel.overlap or overlaps
        return place_of(name) if apart else ALL

    precision = data_types(config.precision.compute)
    storage = storage_of(config, device)
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


def _added(every: Iterable[Mapping[str, Sequence[float]]], name: str) -> float:
    """The sum of all ranks' losses of one name, one after the other, in the same order on every
    layout."""
    total = 0.0
    for of_rank in every:
        for loss in of_rank[name]:
            total += loss
    return total
