"""The price of a layout: step time and memory, and what they are made of.

A step is the pipeline's schedule, then the gradients' sum over the data axis, then the optimizer,
as Megatron-LM and this trainer run it.
"""

import math
from dataclasses import dataclass

from ptdmpi.config.layout import Layout
from ptdmpi.plan.cost import pipeline
from ptdmpi.plan.cost.activations import COMPUTE_BYTES
from ptdmpi.plan.cost.ends import EndTimes
from ptdmpi.plan.cost.layer import LayerTimes, Seconds
from ptdmpi.plan.cost.memory import Footprint, MemoryModel
from ptdmpi.plan.cost.pipeline import StageTimes
from ptdmpi.plan.cost.update import UpdateTimes
from ptdmpi.plan.layout.stages import placement_of
from ptdmpi.plan.machine.cluster import Cluster, Model
from ptdmpi.plan.machine.measured import machine_of
from ptdmpi.plan.schedule.orders import KINDS
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

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.capacity_bytes

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


class Pricer:
    """Prices layouts of one model and batch on one cluster; shapes in common are priced once."""

    def __init__(self, cluster: Cluster, model: Model, batch: int, precision: str) -> None:
        cluster.device.peak(precision)  # refused here, before anything is made of it
        self.cluster, self.model, self.batch = cluster, model, batch
        self.capacity_bytes = cluster.device.memory_bytes
        self.machine = machine_of(cluster, precision, COMPUTE_BYTES[precision])
        self.update = UpdateTimes(self.machine, model, batch)
        self.memory = MemoryModel(
            model.config,
            model.vocab_size,
            precision,
            cluster.software,
            cluster.device.runtime_bytes,
        )
        self._layers: dict[tuple[int, int, bool], tuple[LayerTimes, EndTimes]] = {}
        self._rough: dict[tuple[int, int, int, int, bool, str], float] = {}

    def kernels(self, layout: Layout) -> tuple[LayerTimes, EndTimes]:
        """The parts of the model on a tensor rank: a layer, and embedding and head."""
        key = (layout.tensor, layout.micro_size, layout.sequence_parallel)
        if key not in self._layers:
            told = (self.machine, self.model, layout)
            self._layers[key] = LayerTimes(*told), EndTimes(*told)
        return self._layers[key]

    def stage_seconds(self, layout: Layout) -> list[tuple[Seconds, Seconds]]:
        """(forward, backward) of each stage."""
        layer, ends = self.kernels(layout)
        # a layer that is recomputed runs (part of) its forward once more, in front of its backward
        layer_backward = layer.split_backward if _splits(layout) else layer.backward
        again = layer_backward + layer.recomputed(layout.recompute)
        most = layout.recompute_layers
        alike: dict[tuple[int, int], tuple[Seconds, Seconds]] = {}
        stages = []
        for own in self.memory.split(layout):
            # of the first `most` layers of the model those that this stage holds
            recomputed = len(own) if most is None else min(max(0, most - own.start), len(own))
            key = (len(own), recomputed)
            if key not in alike:
                backward = again * recomputed
                if recomputed < len(own):
                    backward = backward + layer_backward * (len(own) - recomputed)
                alike[key] = (layer.forward * len(own), backward)
            stages.append(alike[key])
        forward, back = stages[0]
        stages[0] = (forward + ends.embedding_forward, back + ends.embedding_backward)
        forward, back = stages[-1]
        stages[-1] = (forward + ends.head_forward, back + ends.head_backward)
        return stages

    def weight_seconds(self, layout: Layout) -> list[Seconds]:
        """The part of each stage's backward that its W is; [] where no backward is split."""
        if not _splits(layout):
            return []
        layer, ends = self.kernels(layout)
        stages = [layer.weights * len(own) for own in self.memory.split(layout)]
        stages[0] = stages[0] + ends.embedding_backward
        stages[-1] = stages[-1] + ends.head_weights
        return stages

    def stage_times(self, layout: Layout) -> StageTimes:
        seconds, p = self.stage_seconds(layout), layout.pipeline
        count = len(seconds)
        # ways[s]: from stage s - 1 to s, and of the gradient back; none in front of the first stage
        # and none behind the last, so that one list serves both directions
        ways = [0.0] * (count + 1)
        if p > 1:
            devices = self.cluster.node.devices
            far = [_crosses_nodes(layout, stage, devices) for stage in range(1, count)]
            way_s = {crosses: self._way_s(layout, crosses) for crosses in set(far)}
            placed = placement_of(layout)
            ways[1:-1] = [
                0.0 if placed.rank_of(stage - 1) == placed.rank_of(stage) else way_s[crosses]
                for stage, crosses in enumerate(far, 1)
            ]
        return StageTimes(
            tuple(forward.total for forward, _ in seconds),
            tuple(backward.total for _, backward in seconds),
            tuple(ways[:-1]),
            tuple(ways[1:]),
            self.cluster.software.overlap_pipeline,
            placement_of(layout),
            tuple(part.total for part in self.weight_seconds(layout)),
        )

    def _way_s(self, layout: Layout, crosses: bool) -> float:
        """Each tensor rank sends the whole tensor, or, scattered, its part, which the receiving
        node's ranks gather (Narayanan et al. 2021, section 4.1)."""
        layer, _ = self.kernels(layout)
        size = layer.boundary_bytes
        scatter = layout.scatter_gather and layout.tensor > 1 and not layout.sequence_parallel
        if not scatter:
            return self.machine.send_s(size, crosses_nodes=crosses)
        part_s = self.machine.send_s(size / layout.tensor, crosses_nodes=crosses)
        return part_s + self.machine.all_gather_s(size, layer.group)

    def bound_s(self, layout: Layout) -> float:
        """A step time that no order of work falls below: what the search prunes by."""
        microbatches = layout.microbatches(self.batch)
        bound = self.stage_times(layout).lower_bound_s(microbatches)
        after_s, _ = self._after_s(layout)
        return bound + sum(after_s)

    def _after_s(self, layout: Layout) -> tuple[tuple[float, float], int]:
        """((exposed data axis, optimizer), elements) behind the pipeline's last backward, on the
        rank with most parameters."""
        layers, ranks = self.memory.split(layout), self.memory.distinct_ranks(layout)
        elements = max(self.memory.elements(layout, rank) for rank in ranks)
        data_s = self.update.data_s(layout, elements)
        if layout.dp_overlap and layout.zero < 3:
            # behind the last microbatch's backward; the last layer's gradients come too late
            hidden_s = sum(backward.total for _, backward in self.stage_seconds(layout)[:1])
            first = placement_of(layout).stages_of(0)
            own = max(1, sum(len(layers[stage]) for stage in first))
            data_s = max(data_s / own, data_s - hidden_s)
        return (data_s, self.update.optimizer_s(layout, elements)), elements

    def rough_bound_s(self, layout: Layout) -> float:
        """A bound below `bound_s` that needs no stages: of the mean rank its work, the filling and
        draining before and behind it, and what follows for the mean of the ranks' parameters."""
        (layer, ends), config = self.kernels(layout), self.model.config
        each = layer.forward.total + layer.backward.total
        each += layer.recomputed(layout.recompute).total
        microbatches, p = layout.microbatches(self.batch), layout.pipeline
        # the mean rank stands in the middle: half of the others fill before it, half drain after;
        # of split backwards nothing is waited for at the end, see StageTimes.lower_bound_s
        passed = layer.forward.total if _splits(layout) else each
        fill_s = (p - 1) / 2 * (config.layers // (p * layout.virtual)) * passed
        sizes = (layout.tensor, p, layout.data, layout.micro_size)
        key = (*sizes, layout.sequence_parallel, layout.recompute)
        if key not in self._rough:
            elements = config.layers * layer_elements(config, layout.tensor) // p
            work_s = config.layers * each + ends.total_s
            after_s = self.update.optimizer_s(layout, elements)
            if not layout.dp_overlap:
                after_s += self.update.data_s(layout, elements)
            self._rough[key] = microbatches * work_s / p + after_s
        return self._rough[key] + fill_s

    def fits(self, layout: Layout) -> bool:
        """Whether every pipeline rank's memory suffices."""
        microbatches = layout.microbatches(self.batch)
        return self.memory.fits(layout, microbatches, self.capacity_bytes)

    def footprint(self, layout: Layout) -> Footprint:
        """The bytes of the pipeline rank that needs most."""
        return self.memory.largest(layout, layout.microbatches(self.batch))[1]

    def price(self, layout: Layout) -> Price:
        """The simulated step; raises InputError for a layout that is not legal."""
        p, microbatches = layout.pipeline, layout.microbatches(self.batch)
        times = self.stage_times(layout)
        makespan_s = pipeline.makespan_s(layout.schedule, microbatches, times)
        (data_s, optimizer_s), _ = self._after_s(layout)
        busiest = max(range(p), key=lambda rank: times.busy_s(rank, microbatches))
        busy_s = times.busy_s(busiest, microbatches)
        mean_s = math.fsum(times.busy_s(r, microbatches) for r in range(p)) / p
        own = times.placed.stages_of(busiest)
        seconds = self.stage_seconds(layout)
        messages_s = (sum(part.messages for part in seconds[stage]) for stage in own)
        tensor_s = microbatches * sum(messages_s)
        ways_s = 0.0
        if not times.overlap:
            ways_s = sum(times.forward_in_s[stage] for stage in own)
            ways_s += sum(times.backward_in_s[stage] for stage in own)
            ways_s *= microbatches
        parts = StepParts(
            compute=busy_s - tensor_s,
            tensor=tensor_s,
            pipeline=ways_s,
            bubble=max(0.0, makespan_s - busy_s - ways_s),  # not -0.0 by rounding
            data=data_s,
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
            model_flops_per_rank=flops.model_flops(config, self.model.vocab_size, tokens)
            / layout.ranks,
            hardware_flops_per_rank=flops.hardware_flops(
                config, self.model.vocab_size, tokens, layout.recompute, recomputed
            )
            / layout.ranks,
            peak_flops=self.machine.peak,
        )


def _splits(layout: Layout) -> bool:
    return KINDS[layout.schedule].splits


def _crosses_nodes(layout: Layout, stage: int, devices: int) -> bool:
    """Whether any data rank's message from stage - 1 to stage leaves its node, which has
    so many devices."""
    row = layout.tensor * layout.data
    placed = placement_of(layout)
    here, there = placed.rank_of(stage - 1) * row, placed.rank_of(stage) * row
    # rows of whole nodes: two pipeline ranks never share one, and the loop below is spared
    if here != there and row % devices == 0:
        return True
    return any(
        (here + i) // devices != (there + i) // devices for i in range(0, row, layout.tensor)
    )
