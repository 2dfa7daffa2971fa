"""The price of a layout: step time and memory, and their parts.

A step consists of the pipeline's schedule, the sum of gradients over the data axis, and the
optimizer, in this order, as in Megatron-LM and in this trainer. If weights or gradients are
sharded, each microbatch needs messages with weights or gradients. These messages count as part of
the schedule's ops (forwards and backwards).
"""

import copy
import itertools
import math
from dataclasses import dataclass, replace

from ptdmpi.config.layout import Layout
from ptdmpi.plan.cost import pipeline
from ptdmpi.plan.cost.footprint import Footprint
from ptdmpi.plan.cost.layer import Seconds
from ptdmpi.plan.cost.step import StepTimes, backward_of, splits
from ptdmpi.plan.layout.run_method import RunMethod
from ptdmpi.plan.machine.cluster import Cluster, Model
from ptdmpi.plan.schedule.simulate import Span, Timeline
from ptdmpi.plan.shape import flops
from ptdmpi.plan.shape.parameters import layer_elements


@dataclass(frozen=True)
class StepParts:
    """The seconds that the busiest rank spends on each kind of work in a step. The sum over all
    kinds of work is the step time."""

    compute: float
    tensor: float  # sums and gathers over the tensor axis
    context: float  # messages of attention over the context axis
    expert: float  # messages that send tokens to experts and back
    pipeline: float  # messages between stages that do not overlap with computation
    bubble: float
    data: float  # sums and gathers over the data axis that do not overlap with computation
    optimizer: float


@dataclass(frozen=True)
class Price:
    """The price of a layout: the time of one step and its parts, memory and FLOPs."""

    layout: Layout
    step_time_s: float
    parts: StepParts
    bubble_fraction: float
    memory: Footprint
    capacity_bytes: float
    model_flops_per_rank: float
    hardware_flops_per_rank: float
    peak_flops: float

    host_capacity_bytes: float  # host memory of one rank

    @property
    def fits(self) -> bool:
        """Return True if the devices and the hosts of the ranks have enough memory for the
        layout."""
        fits = self.memory.total <= self.capacity_bytes
        return fits and self.memory.host <= self.host_capacity_bytes

    @property
    def model_tflops_per_rank(self) -> float:
        """Return the TFLOP/s of a rank, without the FLOPs of recomputation."""
        return self.model_flops_per_rank / self.step_time_s / 1e12

    @property
    def hardware_tflops_per_rank(self) -> float:
        """Return the TFLOP/s of a rank, including the FLOPs of recomputation."""
        return self.hardware_flops_per_rank / self.step_time_s / 1e12

    @property
    def mfu(self) -> float:
        """Return the model FLOP/s of a rank (without recomputation) as a fraction of the device's
        peak."""
        return self.model_flops_per_rank / self.step_time_s / self.peak_flops

    @property
    def communication_fraction(self) -> float:
        """Return the fraction of the step time that ranks spend on messages that do not overlap
        with computation."""
        parts = self.parts
        messages_s = parts.tensor + parts.context + parts.expert + parts.pipeline + parts.data
        return messages_s / self.step_time_s


class Pricer:
    """The prices (step time and memory) of layouts, computed for one model and batch on one
    cluster. The time of kernels with the same shape is computed only once for all layouts. `times`
    has the times of the parts of a step. `usable_bytes` is the number of bytes of a device's memory
    that a layout may fill."""

    def __init__(self, times: StepTimes, batch: int) -> None:
        self.times = times
        self.batch = batch
        self.cluster = times.cluster
        self.model = times.model
        self.machine = times.machine
        self.memory = times.memory
        self.capacity_bytes = self.cluster.device.memory_bytes
        self.usable_bytes = self.capacity_bytes
        host_bytes = self.cluster.host.memory_bytes
        self.host_capacity_bytes = (host_bytes or math.inf) / self.cluster.node.devices
        self._roughly: dict[tuple[object, ...], tuple[float, float]] = {}

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        model: Model,
        batch: int,
        precision: str,
        *,
        method: RunMethod | None = None,
    ) -> "Pricer":
        """Return the pricer of a training with a global batch of `batch` sequences. `method` is the
        data-parallel method, with the properties of the optimizer; by default, the ranks sum their
        gradients, and the optimizer is AdamW. Raises InputError if the device has no peak for
        `precision`."""
        return cls(StepTimes(cluster, model, precision, method), batch)

    def keeping_free(self, share: float) -> "Pricer":
        """Return a copy of this pricer for a search that keeps the fraction `share` of each
        device's memory free, so that fewer layouts fit. The prices of layouts do not change, and
        still show the whole memory of the device."""
        other = copy.copy(self)
        other.usable_bytes = self.capacity_bytes * (1 - share)
        return other

    def bound_s(self, layout: Layout) -> float:
        """Return a lower bound of the step time, in seconds. The bound holds for every order of
        ops. The search uses this bound to exclude layouts."""
        microbatches = layout.microbatches(self.batch)
        bound = self.times.stage_times(layout, microbatches).lower_bound_s(microbatches)
        return bound + sum(self.times.after_s(layout, microbatches))

    def rough_bound_s(self, layout: Layout) -> float:
        """Return a lower bound of `bound_s` that is cheaper to compute, because it does not assign
        layers to stages.

        The bound is the sum of three durations:
        - the time of a rank's work (see `_rough`), averaged over the ranks;
        - the time for which a rank waits while the pipeline fills and drains, also averaged;
        - the time of the optimizer, and of messages over the data axis that do not overlap with
          computation, if each rank had the mean number of the layers' trained parameters.
        """
        after_s, each_s = self.rough_data_s(layout)
        return self.rough_work_s(layout) + after_s + layout.microbatches(self.batch) * each_s

    def rough_work_s(self, layout: Layout) -> float:
        """Return, in seconds, the part of `rough_bound_s` that does not depend on sharding."""
        config = self.model.config
        p, fewest = layout.pipeline, config.layers // layout.stages
        if config.has_unlike_layers:  # a stage of slow layers may have only one
            fewest = 1
        worked_s, passed_s = self._rough(layout)
        # A rank waits for the ranks before it while the pipeline fills, and for the ranks after it
        # while the pipeline drains. On average over the ranks, half of the p - 1 other ranks are
        # before a rank, and half are after it. If the first stage has fewer layers, the other ranks
        # wait for this stage for a shorter time.
        less = fewest - min(fewest, layout.first_layers or fewest)
        return worked_s + (p - 1) * (fewest / 2 - less / p) * passed_s

    def _rough(self, layout: Layout) -> tuple[float, float]:
        """Return two times in seconds. The first is the work of a rank in a step, as the mean over
        the ranks. The second is the time for which other ranks wait while a rank computes one
        microbatch in one layer of the fastest kind. Neither time depends on the number of model
        chunks per rank."""
        axes = (layout.tensor, layout.context, layout.dealing, layout.pipeline, layout.data)
        sizes = (*axes, layout.micro_size)
        how = (layout.recompute, layout.recompute_layers is None, layout.partition_activations)
        key = (
            *sizes,
            layout.exchange,
            *how,
            layout.sequence_parallel,
            layout.scatter_gather,
            splits(layout),
        )
        if key not in self._roughly:
            microbatches = layout.microbatches(self.batch)
            layers_s, passed = self.times.ends(layout).total_s, math.inf
            for kind, count in self.model.config.runs():
                layer = self.times.layer(layout, kind, microbatches)
                back = Seconds() if kind.idle else backward_of(layer, layout)
                # If only some layers are recomputed, the bound ignores recomputation, so it stays a
                # lower bound.
                if layout.recompute_layers is None and not kind.idle:
                    back = back + layer.recomputed(layout)
                layers_s += count * (layer.forward.total + back.total)
                # If backwards are split, the bound contains no wait at the end of the step, because
                # the ranks compute gradients of weights at that time (see
                # `StageTimes.lower_bound_s`).
                waited = layer.forward.total + back.total * (not splits(layout))
                passed = min(passed, waited)
            work = microbatches * layers_s
            self._roughly[key] = work / layout.pipeline, passed
        return self._roughly[key]

    def rough_data_s(self, layout: Layout) -> tuple[float, float]:
        """Return the part of `rough_bound_s` that depends on sharding, as (seconds after the
        pipeline, seconds that each microbatch adds)."""
        layers = self._trained_layers / layout.pipeline
        each = self.times.data.layer_elements(layout.tensor, layout.dealing)
        elements = self._trained_layers * each
        elements //= layout.pipeline
        after_s, each_s = self.times.update.optimizer_s(layout, elements), 0.0
        after_s += self.times.least_matrices_s(layout, layers)
        if not layout.dp_overlap:
            after_s += sum(self.times.data.behind(layout, elements))
            each_s = self.times.data.least_in_ops_s(layout, layers)
        return after_s, each_s

    @property
    def _trained_layers(self) -> int:
        """Return the number of layers that have trained weights or trained adapters."""
        config = self.model.config
        return config.layers - config.idle()

    def may_fit(self, layout: Layout) -> bool:
        """Return False if the layout certainly does not fit: if even the mean, over the ranks, of
        the bytes of weights, gradients and optimizer state is more than a device's memory."""
        config = self.model.config
        layers, t = config.layers / layout.pipeline, layout.tensor
        each = self.times.data.layer_elements(t, layout.dealing)
        train = self._trained_layers / layout.pipeline * each
        frozen = (
            layers * (layer_elements(config, t, layout.dealing) - each)
            if config.adapt.adapts
            else 0
        )
        standing = train * self.memory.parameter_bytes(layout)
        standing += self.memory.least_frozen_bytes(layout, frozen, layers, t)
        return standing <= self.usable_bytes - self.memory.runtime_bytes

    def fits(self, layout: Layout) -> bool:
        """Return True if every pipeline rank has enough memory on its device, and on its host."""
        microbatches = layout.microbatches(self.batch)
        if not self.memory.fits(layout, microbatches, self.usable_bytes):
            return False
        if not self.memory.uses_host(layout):
            return True
        ranks = self.memory.distinct_ranks(layout)
        return all(self.memory.host_bytes(layout, r) <= self.host_capacity_bytes for r in ranks)

    def footprint(self, layout: Layout) -> Footprint:
        """Return the memory, in bytes, of the pipeline rank that needs the most memory."""
        return self.memory.largest(layout, layout.microbatches(self.batch))[1]

    def timeline(self, layout: Layout, title: str) -> Timeline:
        """Return a timeline with the start and the end of each op in a step, for a picture. The
        messages of the data axis come after the pipeline, and the optimizer comes after these
        messages."""
        microbatches = layout.microbatches(self.batch)
        times = self.times.stage_times(layout, microbatches)
        drawn = pipeline.timeline(layout.schedule, microbatches, times, title)
        end_s = drawn.start_s + drawn.makespan_s
        moments = itertools.accumulate(self.times.after_s(layout, microbatches), initial=end_s)
        lasts = zip(("reduce", "optimizer"), itertools.pairwise(moments), strict=True)
        spans = [
            Span(rank=rank, kind=kind, op="", start_s=start_s, end_s=end_s)
            for kind, (start_s, end_s) in lasts
            for rank in drawn.ranks
            if end_s > start_s
        ]
        return replace(drawn, spans=(*drawn.spans, *spans))

    def price(self, layout: Layout) -> Price:
        """Simulate a step of the layout, and return the layout's price. Raises InputError for a
        layout that is not legal."""
        p, microbatches = layout.pipeline, layout.microbatches(self.batch)
        times = self.times.stage_times(layout, microbatches)
        makespan_s = pipeline.makespan_s(layout.schedule, microbatches, times)
        data_s, optimizer_s = self.times.after_s(layout, microbatches)
        busiest = max(range(p), key=lambda rank: times.busy_s(rank, microbatches))
        busy_s = times.busy_s(busiest, microbatches)
        mean_s = math.fsum(times.busy_s(r, microbatches) for r in range(p)) / p
        own = times.placed.stages_of(busiest)
        seconds = self.times.stage_seconds(layout, microbatches)
        messages_s = (sum(part.messages for part in seconds[stage]) for stage in own)
        tensor_s = microbatches * sum(messages_s)
        keys_s = (sum(part.context for part in seconds[stage]) for stage in own)
        context_s = microbatches * sum(keys_s)
        tokens_s = (sum(part.expert for part in seconds[stage]) for stage in own)
        expert_s = microbatches * sum(tokens_s)
        sent = self.times.in_ops_s(layout, seconds)
        sent_s = microbatches * sum(sum(sent[stage]) for stage in own)
        ways_s = 0.0
        if not times.overlap:
            ways_s = sum(times.forward_in_s[stage] for stage in own)
            ways_s += sum(times.backward_in_s[stage] for stage in own)
            ways_s *= microbatches
        parts = StepParts(
            compute=busy_s - tensor_s - context_s - expert_s - sent_s,
            tensor=tensor_s,
            context=context_s,
            expert=expert_s,
            pipeline=ways_s,
            # rounding errors could make the difference negative
            bubble=max(0.0, makespan_s - busy_s - ways_s),
            data=data_s + sent_s,
            optimizer=optimizer_s,
        )
        config, tokens = self.model.config, self.batch * self.model.config.seq_length
        recomputed = config.layers if layout.recompute_layers is None else layout.recompute_layers
        return Price(
            layout=layout,
            step_time_s=makespan_s + data_s + optimizer_s,
            parts=parts,
            bubble_fraction=max(0.0, makespan_s - mean_s) / mean_s,
            memory=self.footprint(layout),
            capacity_bytes=self.capacity_bytes,
            host_capacity_bytes=self.host_capacity_bytes,
            model_flops_per_rank=flops.model_flops(config, self.model.vocab_size, tokens)
            / layout.ranks,
            hardware_flops_per_rank=flops.hardware_flops(
                config, self.model.vocab_size, tokens, layout.recompute, layers=recomputed
            )
            / layout.ranks,
            peak_flops=self.machine.peak,
        )
