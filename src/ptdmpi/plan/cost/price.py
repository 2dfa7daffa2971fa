"""The price of a layout: step time and memory, and what they are made of.

A step is the pipeline's schedule, then the gradients' sum over the data axis, then the optimizer,
as Megatron-LM and this trainer run it. What sharding sends in each microbatch is part of its ops.
"""

import itertools
import math
from dataclasses import dataclass, replace

from ptdmpi.config.layout import Layout
from ptdmpi.plan.cost import pipeline
from ptdmpi.plan.cost.memory import Footprint
from ptdmpi.plan.cost.step import StepTimes, splits
from ptdmpi.plan.layout.messages import RunMethod
from ptdmpi.plan.machine.cluster import Cluster, Model
from ptdmpi.plan.schedule.simulate import Span, Timeline
from ptdmpi.plan.shape import flops
from ptdmpi.plan.shape.parameters import layer_elements


@dataclass(frozen=True)
class StepParts:
    """Seconds of the busiest rank's step, by what they are spent on; together the step time."""

    compute: float
    tensor: float  # sums over the tensor axis
    pipeline: float  # messages between stages that nothing hides
    bubble: float
    data: float  # sums and gathers over the data axis that nothing hides
    optimizer: float


@dataclass(frozen=True)
class Price:
    """What one step of a layout counts."""

    layout: Layout
    step_time_s: float
    parts: StepParts
    bubble_fraction: float
    memory: Footprint
    capacity_bytes: float
    model_flops_per_rank: float
    hardware_flops_per_rank: float
    peak_flops: float

    host_capacity_bytes: float  # of one rank

    @property
    def fits(self) -> bool:
        fits = self.memory.total <= self.capacity_bytes
        return fits and self.memory.host <= self.host_capacity_bytes

    @property
    def model_tflops_per_rank(self) -> float:
        return self.model_flops_per_rank / self.step_time_s / 1e12

    @property
    def hardware_tflops_per_rank(self) -> float:
        return self.hardware_flops_per_rank / self.step_time_s / 1e12

    @property
    def mfu(self) -> float:
        return self.model_flops_per_rank / self.step_time_s / self.peak_flops

    @property
    def communication_fraction(self) -> float:
        parts = self.parts
        return (parts.tensor + parts.pipeline + parts.data) / self.step_time_s


class Pricer(StepTimes):
    """Prices layouts of one model and batch on one cluster; shapes in common are priced once."""

    def __init__(
        self,
        cluster: Cluster,
        model: Model,
        batch: int,
        precision: str,
        method: RunMethod | None = None,
    ) -> None:
        """`method`: as of `StepTimes`."""
        super().__init__(cluster, model, precision, method)
        self.batch = batch
        self.capacity_bytes = cluster.device.memory_bytes
        host_bytes = cluster.host.memory_bytes
        self.host_capacity_bytes = (host_bytes or math.inf) / cluster.node.devices
        self._roughly: dict[tuple[object, ...], tuple[float, float]] = {}

    def bound_s(self, layout: Layout) -> float:
        """A step time that no order of work falls below: what the search prunes by."""
        microbatches = layout.microbatches(self.batch)
        bound = self.stage_times(layout).lower_bound_s(microbatches)
        return bound + sum(self.after_s(layout))

    def rough_bound_s(self, layout: Layout) -> float:
        """A bound below `bound_s` that needs no stages: of the mean rank its work, the filling and
        draining before and behind it, and what follows for the mean of the ranks' parameters."""
        after_s, each_s = self.rough_data_s(layout)
        return self.rough_work_s(layout) + after_s + layout.microbatches(self.batch) * each_s

    def rough_work_s(self, layout: Layout) -> float:
        """The part of it that does not depend on what is sharded."""
        p, fewest = layout.pipeline, self.model.config.layers // layout.stages
        worked_s, passed_s = self._rough(layout)
        # the mean rank stands in the middle: half of the others fill before it, half drain after;
        # a first stage with fewer layers is one that all others wait less for
        less = fewest - min(fewest, layout.first_layers or fewest)
        return worked_s + (p - 1) * (fewest / 2 - less / p) * passed_s

    def _rough(self, layout: Layout) -> tuple[float, float]:
        """(work of the mean rank, a layer's time while others wait), whatever the chunks are."""
        sizes = (layout.tensor, layout.pipeline, layout.data, layout.micro_size)
        how = (layout.recompute, layout.recompute_layers is None, layout.partition_activations)
        key = (*sizes, *how, layout.sequence_parallel, layout.scatter_gather, splits(layout))
        if key not in self._roughly:
            (layer, ends), config = self.kernels(layout), self.model.config
            back = layer.split_backward if splits(layout) else layer.backward
            # of layers of which only some are recomputed: as if none of them were
            if layout.recompute_layers is None:
                back = back + layer.recomputed(layout)
            each = layer.forward.total + back.total
            idle, ahead_s = config.idle(), self.idle_layer(layout).forward.total
            layers_s = (config.layers - idle) * each + idle * ahead_s
            work = layout.microbatches(self.batch) * (layers_s + ends.total_s)
            # of split backwards nothing is waited for at the end, see StageTimes.lower_bound_s
            passed = layer.forward.total if splits(layout) else each
            passed = min(passed, ahead_s) if idle else passed
            self._roughly[key] = work / layout.pipeline, passed
        return self._roughly[key]

    def rough_data_s(self, layout: Layout) -> tuple[float, float]:
        """(behind the pipeline, with each microbatch): the other part."""
        layers = self._trained_layers / layout.pipeline
        elements = self._trained_layers * self.data.layer_elements(layout.tensor)
        elements //= layout.pipeline
        after_s, each_s = self.update.optimizer_s(layout, elements), 0.0
        after_s += self.least_matrices_s(layout, layers)
        if not layout.dp_overlap:
            after_s += sum(self.data.behind(layout, elements))
            each_s = self.data.least_in_ops_s(layout, layers)
        return after_s, each_s

    @property
    def _trained_layers(self) -> int:
        """Layers of which, or beside which, something trains."""
        config = self.model.config
        return config.layers - config.idle()

    def may_fit(self, layout: Layout) -> bool:
        """False only where what stands all the time is too much for the mean rank, whatever the
        rest of the layout is."""
        config = self.model.config
        layers, t = config.layers / layout.pipeline, layout.tensor
        each = self.data.layer_elements(t)
        train = self._trained_layers / layout.pipeline * each
        frozen = layers * (layer_elements(config, t) - each) if config.adapt.adapts else 0
        standing = train * self.memory.parameter_bytes(layout)
        standing += self.memory.least_frozen_bytes(layout, frozen, layers, t)
        return standing <= self.capacity_bytes - self.memory.runtime_bytes

    def fits(self, layout: Layout) -> bool:
        """Whether every pipeline rank's memory suffices."""
        microbatches = layout.microbatches(self.batch)
        if not self.memory.fits(layout, microbatches, self.capacity_bytes):
            return False
        ranks = self.memory.distinct_ranks(layout) if layout.offload != "none" else ()
        return all(self.memory.host_bytes(layout, r) <= self.host_capacity_bytes for r in ranks)

    def footprint(self, layout: Layout) -> Footprint:
        """The bytes of the pipeline rank that needs most."""
        return self.memory.largest(layout, layout.microbatches(self.batch))[1]

    def timeline(self, layout: Layout, title: str) -> Timeline:
        """The step op by op, to be drawn: behind the pipeline the data axis, then the optimizer."""
        microbatches = layout.microbatches(self.batch)
        times = self.stage_times(layout)
        drawn = pipeline.timeline(layout.schedule, microbatches, times, title)
        end_s = drawn.start_s + drawn.makespan_s
        moments = itertools.accumulate(self.after_s(layout), initial=end_s)
        lasts = zip(("reduce", "optimizer"), itertools.pairwise(moments), strict=True)
        spans = [
            Span(rank, kind, "", start_s, end_s)
            for kind, (start_s, end_s) in lasts
            for rank in drawn.ranks
            if end_s > start_s
        ]
        return replace(drawn, spans=(*drawn.spans, *spans))

    def price(self, layout: Layout) -> Price:
        """The simulated step; raises InputError for a layout that is not legal."""
        p, microbatches = layout.pipeline, layout.microbatches(self.batch)
        times = self.stage_times(layout)
        makespan_s = pipeline.makespan_s(layout.schedule, microbatches, times)
        data_s, optimizer_s = self.after_s(layout)
        busiest = max(range(p), key=lambda rank: times.busy_s(rank, microbatches))
        busy_s = times.busy_s(busiest, microbatches)
        mean_s = math.fsum(times.busy_s(r, microbatches) for r in range(p)) / p
        own = times.placed.stages_of(busiest)
        seconds = self.stage_seconds(layout)
        messages_s = (sum(part.messages for part in seconds[stage]) for stage in own)
        tensor_s = microbatches * sum(messages_s)
        sent = self.in_ops_s(layout, seconds)
        sent_s = microbatches * sum(sum(sent[stage]) for stage in own)
        ways_s = 0.0
        if not times.overlap:
            ways_s = sum(times.forward_in_s[stage] for stage in own)
            ways_s += sum(times.backward_in_s[stage] for stage in own)
            ways_s *= microbatches
        parts = StepParts(
            compute=busy_s - tensor_s - sent_s,
            tensor=tensor_s,
            pipeline=ways_s,
            bubble=max(0.0, makespan_s - busy_s - ways_s),  # not -0.0 by rounding
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
                config, self.model.vocab_size, tokens, layout.recompute, recomputed
            )
            / layout.ranks,
            peak_flops=self.machine.peak,
        )
