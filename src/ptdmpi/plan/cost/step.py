"""The times of the parts of a step in a layout: the stages, the messages between stages, and the
work after the pipeline's last backward."""

import itertools
from collections.abc import Sequence

from ptdmpi.config.kinds import LayerKind, count_of, trained_runs
from ptdmpi.config.layout import Layout
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.plan.cost.data_axis import DataAxis
from ptdmpi.plan.cost.layer import EndTimes, LayerTimes, Seconds
from ptdmpi.plan.cost.memory import MemoryModel
from ptdmpi.plan.cost.pipeline import StageTimes
from ptdmpi.plan.cost.stage_memory import Cut
from ptdmpi.plan.cost.update import UpdateTimes
from ptdmpi.plan.layout.run_method import RunMethod
from ptdmpi.plan.layout.stages import placement_of
from ptdmpi.plan.machine.cluster import Cluster, Model
from ptdmpi.plan.machine.measured import machine_of
from ptdmpi.plan.schedule.orders import KINDS
from ptdmpi.plan.shape.matrices import wholes

MOST_TIMES = 10_000  # largest number of results that `StepTimes.stage_seconds` caches


class StepTimes:
    """The times, in seconds, of the parts of a step, for one model on one cluster. The time of
    kernels with the same shape is computed only once for all layouts. The argument `microbatches`
    of a method is the number of microbatches of a data rank in a step."""

    def __init__(
        self, cluster: Cluster, model: Model, precision: str, method: RunMethod | None = None
    ) -> None:
        """Store the cluster and the model. `method` gives the number of optimizer moments per
        parameter and the size of the receive buffers. By default, the ranks sum their gradients,
        and the optimizer is AdamW. Raises InputError if the device has no peak for `precision`."""
        cluster.device.peak(precision)  # raises InputError if there is no peak
        self.cluster, self.model = cluster, model
        self.machine = machine_of(cluster, precision, PRECISIONS[precision].compute.bytes)
        self.method = method or RunMethod()
        self.data = DataAxis(self.machine, model)
        self.update = UpdateTimes(self.machine, self.method)
        self.memory = MemoryModel(
            model.config,
            model.vocab_size,
            precision,
            cluster.software,
            runtime_bytes=cluster.device.runtime_bytes,
            on_host=cluster.on_host,
            method=self.method,
        )
        self._layers: dict[tuple[object, ...], LayerTimes] = {}
        self._ends: dict[tuple[object, ...], EndTimes] = {}
        self._stages: dict[tuple[object, ...], tuple[tuple[Seconds, Seconds], ...]] = {}

    def layer(self, layout: Layout, kind: LayerKind, microbatches: int) -> LayerTimes:
        """Return the times of a layer of kind `kind` on one tensor-parallel rank."""
        by_source = layout.computes_by_source(microbatches)
        key = (kind, by_source, *_layer_key(layout))
        if key not in self._layers:
            self._layers[key] = LayerTimes(
                self.machine, self.model, layout, kind, by_source=by_source
            )
        return self._layers[key]

    def ends(self, layout: Layout) -> EndTimes:
        """Return the times of embedding and head on one tensor-parallel rank."""
        key = _layer_key(layout)
        if key not in self._ends:
            self._ends[key] = EndTimes(self.machine, self.model, layout)
        return self._ends[key]

    def stage_seconds(
        self, layout: Layout, microbatches: int
    ) -> tuple[tuple[Seconds, Seconds], ...]:
        """Return, for each stage, the times of its forward and of its backward for one
        microbatch."""
        how = (layout.recompute, layout.recompute_layers, layout.partition_activations)
        ways = (splits(layout), layout.computes_by_source(microbatches))
        key = (Cut.of(layout), *_layer_key(layout), *how, *ways)
        if key not in self._stages:
            if len(self._stages) > MOST_TIMES:
                self._stages.clear()
            self._stages[key] = tuple(self._counted_seconds(layout, microbatches))
        return self._stages[key]

    def _counted_seconds(self, layout: Layout, microbatches: int) -> list[tuple[Seconds, Seconds]]:
        """Compute the times that `stage_seconds` returns."""
        ends, most = self.ends(layout), layout.recompute_layers
        alike: dict[tuple[tuple[LayerKind, int, int], ...], tuple[Seconds, Seconds]] = {}
        stages = []
        held = self.memory.stages
        for layers, part in zip(held.split(layout), held.stage_parts(layout), strict=True):
            counts = []
            start = layers.start
            for kind, count in part.runs:
                # only the model's first `most` layers are recomputed: `again` of these layers
                again = count if most is None else min(max(0, most - start), count)
                counts.append((kind, count, again))
                start += count
            key = tuple(counts)
            if key not in alike:
                alike[key] = self._summed_seconds(layout, key, microbatches)
            stages.append(alike[key])
        forward, back = stages[0]
        stages[0] = (forward + ends.embedding_forward, back + ends.embedding_backward)
        forward, back = stages[-1]
        stages[-1] = (forward + ends.head_forward, back + ends.head_backward)
        return stages

    def _summed_seconds(
        self, layout: Layout, counts: Sequence[tuple[LayerKind, int, int]], microbatches: int
    ) -> tuple[Seconds, Seconds]:
        """Return the times of (forward, backward) of some layers for one microbatch. `counts` has,
        for each group of consecutive layers of one kind, the kind, the number of layers, and the
        number of these layers that may be recomputed."""
        forward = backward = Seconds()
        for kind, count, recomputed in counts:
            layer = self.layer(layout, kind, microbatches)
            forward = forward + layer.forward.launched * count
            if kind.idle:
                continue
            own = backward_of(layer, layout)
            # a recomputed layer computes its forward, or a part of it, again before its backward
            again = (own + layer.recomputed(layout)).launched
            backward = backward + again * recomputed + own.launched * (count - recomputed)
        return forward, backward

    def weight_seconds(self, layout: Layout, microbatches: int) -> list[Seconds]:
        """Return the seconds that each stage's backward spends on W, the gradients of weights; []
        if no backward is split."""
        if not splits(layout):
            return []
        ends = self.ends(layout)
        stages = []
        for part in self.memory.stages.stage_parts(layout):
            runs = trained_runs(part.runs)
            works = (
                self.layer(layout, kind, microbatches).weights.launched * count
                for kind, count in runs
            )
            stages.append(sum(works, Seconds()))
        stages[0] = stages[0] + ends.embedding_backward
        stages[-1] = stages[-1] + ends.head_weights
        return stages

    def stage_times(self, layout: Layout, microbatches: int) -> StageTimes:
        """Return the seconds of each stage's forward and backward, and of the messages between
        stages."""
        seconds, p = self.stage_seconds(layout, microbatches), layout.pipeline
        count = len(seconds)
        # `ways[s]` is the seconds of a message between stages s - 1 and s, in either direction. The
        # first and the last entry are 0, because there is no stage before the first or after the
        # last.
        ways = [0.0] * (count + 1)
        if p > 1:
            devices = self.cluster.node.devices
            far = _crossings(layout, count, devices)
            way_s = {crosses: self._way_s(layout, crosses) for crosses in set(far)}
            between = zip(itertools.pairwise(placement_of(layout).ranks), far, strict=True)
            ways[1:-1] = [
                0.0 if here == there else way_s[crosses] for (here, there), crosses in between
            ]
        sent = self.in_ops_s(layout, seconds)
        return StageTimes(
            forward_s=tuple(
                part.total + more[0] for (part, _), more in zip(seconds, sent, strict=True)
            ),
            backward_s=tuple(
                part.total + more[1] for (_, part), more in zip(seconds, sent, strict=True)
            ),
            forward_in_s=tuple(ways[:-1]),
            backward_in_s=tuple(ways[1:]),
            overlap=self.cluster.software.overlap_pipeline,
            placed=placement_of(layout),
            weight_s=tuple(part.total for part in self.weight_seconds(layout, microbatches)),
        )

    def in_ops_s(
        self, layout: Layout, seconds: Sequence[tuple[Seconds, Seconds]]
    ) -> list[tuple[float, float]]:
        """Return, for each stage, the seconds that the messages of sharded gradients and weights
        add to the (forward, backward) of a microbatch.

        If messages overlap with computation (`dp_overlap`), only the time by which the messages of
        an op take longer than the op is added.
        """
        # return early, because a search visits many layouts without sharded gradients
        if not layout.shards_gradients:
            return [(0.0, 0.0)] * len(seconds)
        # most stages of a layout have the same layers, so their times are computed only once
        parts, of_stages = self.memory.stages.alike_parts(Cut.of(layout), layout.tensor)
        alike = [self.data.in_ops(layout, part)[:2] for part in parts]
        if not layout.dp_overlap:
            return [alike[number] for number in of_stages]
        return [
            (
                max(0.0, alike[number][0] - forward.total),
                max(0.0, alike[number][1] - backward.total),
            )
            for number, (forward, backward) in zip(of_stages, seconds, strict=True)
        ]

    def _way_s(self, layout: Layout, crosses: bool) -> float:
        """Return the seconds of one message between two stages. If `crosses` is True, the stages
        are on different nodes.

        Each tensor-parallel rank sends the whole tensor. If messages are scattered, each
        tensor-parallel rank sends only its slice, and the tensor-parallel ranks of the next stage
        gather the slices (Narayanan et al. 2021, section 4.1).
        """
        ends = self.ends(layout)
        size = ends.sizes.boundary_bytes
        scatter = layout.scatter_gather and layout.tensor > 1 and not layout.sequence_parallel
        if not scatter:
            return self.machine.send_s(size, crosses_nodes=crosses)
        part_s = self.machine.send_s(size / layout.tensor, crosses_nodes=crosses)
        return part_s + self.machine.all_gather_s(size, ends.group)

    def after_s(self, layout: Layout, microbatches: int) -> tuple[float, float]:
        """Return two times, in seconds, of the work after the pipeline's last backward: the time
        for which messages over the data axis do not overlap with computation, and the time of the
        optimizer.

        Both times are for the rank with the most trained parameters. The first time also includes
        the time to compute the norm of a rank's own gradient, as the measured times of a run do.
        """
        layers, ranks = self.memory.stages.split(layout), self.memory.distinct_ranks(layout)
        elements = max(self.memory.stages.trained(layout, rank) for rank in ranks)
        behind = self.data.behind(layout, elements)
        data_s = sum(behind)
        if layout.dp_overlap:
            forward, backward = self.stage_seconds(layout, microbatches)[0]
            own = max(1, sum(len(layers[stage]) for stage in placement_of(layout).stages_of(0)))
            # Gradients are sent during the last microbatch's backward, except those of the layer
            # that this backward computes last. Weights are sent during the next step's forward,
            # except those of the first layer, which the forward needs immediately.
            hidden = ((behind.gradients_s, backward.total), (behind.weights_s, forward.total))
            data_s = sum(max(whole / own, whole - over) for whole, over in hidden)
            # the last message does not overlap with computation, because no op follows it
            data_s += self.data.in_ops(layout, self.memory.stages.stage_parts(layout)[0]).last_s
        data_s += self.update.own_norm_s(elements, self.method.noise_every)
        optimizer_s = self.update.optimizer_s(layout, elements)
        return data_s, optimizer_s + self.matrices_s(layout, ranks)

    def matrices_s(self, layout: Layout, ranks: Sequence[int]) -> float:
        """Return the seconds that Muon needs to update the matrices of a rank. The result is the
        maximum over the pipeline ranks in `ranks` and over the ranks of their shard groups (ranks
        that divide one copy of the state)."""
        if not self.method.matrices:
            return 0.0
        groups = self.ends(layout).group, self.data.shard_group(layout)
        cut, sharing = Cut.of(layout), layout.sharing
        every = (self.memory.stages.dealt(cut, layout.tensor, rank, sharing) for rank in ranks)
        works = itertools.chain.from_iterable(every)
        return max(self.update.matrices_s(work, layout.tensor, *groups) for work in works)

    def least_matrices_s(self, layout: Layout, layers: float) -> float:
        """Return a lower bound of the seconds that Muon needs to update the matrices of `layers`
        layers. The bound is the mean work of the ranks of a shard group, without messages."""
        if not self.method.matrices:
            return 0.0
        group, t, config = self.ends(layout).group, layout.tensor, self.model.config
        runs = trained_runs(config.runs())
        each = (
            count * self.update.matrix_s(matrix, t, group)
            for kind, count in runs
            for matrix in wholes(config, t, layout.dealing, kind)
        )
        return layers / max(1, count_of(runs)) * sum(each) / layout.shards


def splits(layout: Layout) -> bool:
    """Return True if the schedule of `layout` splits a backward into I (gradient of the input) and
    W (gradients of the weights)."""
    return KINDS[layout.schedule].splits


def backward_of(layer: LayerTimes, layout: Layout) -> Seconds:
    """Return the times of a layer's backward: of a split backward if the schedule of `layout`
    splits backwards, and otherwise of an unsplit one."""
    if splits(layout):
        return layer.split_backward
    return layer.backward


def _layer_key(layout: Layout) -> tuple[object, ...]:
    """Return the settings of `layout` that determine the times of a layer. The result is the key
    under which these times are cached."""
    return (
        layout.tensor,
        layout.context,
        layout.exchange,
        layout.dealing,
        layout.micro_size,
        layout.sequence_parallel,
    )


def _crossings(layout: Layout, count: int, devices: int) -> list[bool]:
    """Return a flag for each of `count` stages except the first. The flag is True if, in at least
    one replica, the message from the previous stage goes to another node. A node has `devices`
    devices.

    If two stages are on one rank, nothing is sent, and the flag has no meaning.
    """
    row = layout.tensor * layout.context * layout.data
    if row % devices == 0:  # the ranks with the same pipeline coordinate fill whole nodes
        return [True] * (count - 1)
    placed = placement_of(layout)
    starts = [placed.rank_of(stage) * row for stage in range(count)]
    return [
        any((here + i) // devices != (there + i) // devices for i in range(0, row, layout.tensor))
        for here, there in itertools.pairwise(starts)
    ]
