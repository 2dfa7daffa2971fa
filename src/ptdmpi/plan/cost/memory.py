"""The memory of a rank in a layout. `ptdmpi plan` and the check before training both use this model
of memory.

Parameters are counted from the same list of operators from which the model is built
(`plan.shape.parameters`). Activations are counted by `plan.cost.stage_memory`. The number of
microbatches in flight comes from the order of the schedule's ops (`plan.schedule.flight`). Sharded
state is counted as in Rajbhandari et al. 2020 (arXiv 1910.02054, section 5), but with a float32
copy of the gradient if gradients are summed in fp16 or bf16. For example, let weights be in a
16-bit type (2 bytes), and let gradients be summed in float32 (4 bytes). AdamW has 12 bytes of state
(two moments and a master weight). With S shards, a parameter then takes 2 + 4 + 12/S bytes under
ZeRO 1, 2 + (4 + 12)/S under ZeRO 2, and 18/S under ZeRO 3.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from operator import mul
from typing import NamedTuple

from ptdmpi.config import Config, Layout, ModelConfig
from ptdmpi.config.kinds import LayerKind, Runs
from ptdmpi.config.precision import FLOAT32, PRECISIONS
from ptdmpi.config.zero import Sharing
from ptdmpi.plan.cost import tree
from ptdmpi.plan.cost.footprint import Footprint
from ptdmpi.plan.cost.stage_memory import Cut, StageMemory, activation_key, segments
from ptdmpi.plan.layout.run_method import RunMethod
from ptdmpi.plan.layout.stages import placement_of
from ptdmpi.plan.machine.cluster import TRAINER, Software
from ptdmpi.plan.schedule.flight import NOTHING, RankOrder, fullest_alike
from ptdmpi.plan.schedule.ops import ACTIVATIONS
from ptdmpi.plan.schedule.orders import KINDS, Placement
from ptdmpi.plan.shape.codes import largest_tile
from ptdmpi.plan.shape.parameters import frozen_layer

# Offloaded optimizer state is read from a file and written back in blocks of this number of bytes.
# Two blocks are in memory at the same time.
CHUNK_BYTES = 64 * 2**20
MOST_FLIGHTS = 10_000  # largest number of results that `MemoryModel._held` caches


# The properties of a stage that determine its memory (see `_sort`): its layers without a backward,
# its other layers, True if the stage is the model's first, and True if the stage is the model's
# last.
Sort = tuple[Runs, tuple[tuple[LayerKind, str, int], ...], bool, bool]


class StateBytes(NamedTuple):
    """The bytes that are in use during the whole step: weights, gradients and optimizer state on a
    rank's device, and the rank's offloaded state in the host's memory."""

    weights: int
    gradients: int
    optimizer: int
    host: int

    @property
    def on_device(self) -> int:
        """Return the bytes of weights, gradients and optimizer state on the device."""
        return self.weights + self.gradients + self.optimizer


def _placed(offload: str, optimizer: int, rooms: int, on_host: bool) -> tuple[int, int]:
    """Return (bytes of optimizer state on the device, bytes in the host's memory). `optimizer` is
    the bytes of a rank's optimizer state. `rooms` is the bytes of the additional buffers that the
    host needs if it updates the weights. If ranks compute on the host (`on_host`), the device's
    memory is the host's memory, so all bytes are counted on the device, and the second number is
    0."""
    held = optimizer
    if offload == "disk":
        held = min(optimizer, 2 * CHUNK_BYTES)
    if on_host or offload == "none":
        return held, 0
    return 0, held + rooms


def _how(layout: Layout) -> tuple[Sharing, str]:
    """Return two settings of a layout: the sharding of its state, and the value of
    `parallel.offload`, which says where the optimizer state is stored."""
    return layout.sharing, layout.offload


def _shards(sharing: Sharing) -> tuple[int, int, int, int]:
    """Return four numbers, in the order of `_each_bytes`: the numbers of shards into which weights,
    gradients, float32 copies of gradients, and optimizer state are divided."""
    whole_update = (sharing.state_shards, sharing.state_shards)
    return sharing.weight_shards, sharing.gradient_shards, *whole_update


class MemoryModel:
    """The memory of one model in one compute type, as the program `software` trains it. Results
    that are equal for several layouts are cached.

    `stages` computes the bytes and parameters of the model's stages. `runtime_bytes` is the memory
    in use before the first tensor. `on_host` is True if ranks compute on the host, so that
    offloading to the host's memory moves nothing. `method` gives three things: the number of
    optimizer values for each master weight, the size of the receive buffers of the data axis, and
    the number of copies of the state in the host's memory.
    """

    def __init__(
        self,
        model: ModelConfig,
        vocab_size: int,
        precision: str,
        software: Software = TRAINER,
        *,
        runtime_bytes: float = 0.0,
        on_host: bool = True,
        method: RunMethod | None = None,
    ) -> None:
        self.stages = StageMemory(model, vocab_size, precision, software, on_host=on_host)
        self.model, self.vocab_size = model, vocab_size
        self.precision, self.software = precision, software
        self.method = method or RunMethod()
        self.runtime_bytes, self.on_host = runtime_bytes, on_host
        self.compute_bytes = PRECISIONS[precision].compute.bytes
        self.wide_bytes = PRECISIONS[precision].master.bytes
        self.tile = largest_tile(model, vocab_size)
        self._distinct = cache(self._counted_distinct)
        self.sorts = cache(self._counted_sorts)
        self._standing = cache(self._counted_standing)
        self._stands = cache(self._counted_stands)
        self._flights: dict[tuple[object, ...], tuple[int, int]] = {}
        self._least_flights: dict[tuple[object, ...], int] = {}

    @classmethod
    def of(
        cls,
        config: Config,
        vocab_size: int,
        *,
        kernels: Mapping[str, int] | None = None,
        on_host: bool = True,
        nodes: int = 1,
    ) -> "MemoryModel":
        """Return the memory model for a training on `nodes` nodes. `kernels` has the fields of
        `Software` that depend on the kernels of the run, such as `wide_products` and
        `kept_block`."""
        named = (config.model, vocab_size, config.precision.compute)
        software = TRAINER.model_copy(update={**(kernels or {}), "repeats_keys": not on_host})
        return cls(*named, software, on_host=on_host, method=RunMethod.of(config, nodes))

    def distinct_ranks(self, layout: Layout) -> tuple[int, ...]:
        """Return the pipeline ranks among which the rank with the highest peak must be. With some
        schedules (`earlier_holds_more`), an earlier rank holds at least as many microbatches as a
        later rank. Of several ranks with equal stages, the first rank then needs the most memory.
        With these schedules, the result therefore has only the first rank of each group of ranks
        with equal stages. With other schedules, the result has all ranks."""
        if not KINDS[layout.schedule].earlier_holds_more:
            return tuple(range(layout.pipeline))
        return self._distinct(Cut.of(layout), layout.recompute_layers)

    def _counted_distinct(self, cut: Cut, recompute_layers: int | None) -> tuple[int, ...]:
        """Return the first rank of each group of pipeline ranks with equal stages. Two ranks are in
        one group if their stages have equal properties (`_sort`)."""
        layers = self.stages.layers_of(cut)
        first: dict[object, int] = {}
        for rank in range(cut.placed.pipeline):
            stages = cut.placed.stages_of(rank)
            sorts = (self._sort(layers[s], recompute_layers, cut.placed, s) for s in stages)
            first.setdefault(tuple(sorts), rank)
        return tuple(first.values())

    def _counted_sorts(
        self, cut: Cut, recompute_layers: int | None, rank: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Group the stages of a pipeline rank by their properties (`_sort`). Whatever the other
        settings of the layout are, the stages of one group need the same memory. Return (one stage
        of each group, the index of each stage's group)."""
        layers = self.stages.layers_of(cut)
        numbers: dict[Sort, int] = {}
        examples: list[int] = []
        of_stages: list[int] = []
        for stage in cut.placed.stages_of(rank):
            sort = self._sort(layers[stage], recompute_layers, cut.placed, stage)
            if sort not in numbers:
                numbers[sort] = len(examples)
                examples.append(stage)
            of_stages.append(numbers[sort])
        return tuple(examples), tuple(of_stages)

    def _sort(
        self, own: range, recompute_layers: int | None, placed: Placement, stage: int
    ) -> Sort:
        """Return the four properties that determine the memory of the stage `stage`: its layers
        without a backward, its other layers (grouped by kind of layer and mode of recomputation),
        True if it is the model's first stage, and True if it is the model's last stage. `own` is
        the range of the stage's layers."""
        layout = Layout(1, 1, 1, recompute="full", recompute_layers=recompute_layers)
        idle = self.model.idle(own)
        runs = self.stages.runs_of
        others = tuple(segments(runs(own[idle:]), layout, own.start + idle))
        return runs(own[:idle]), others, stage == 0, stage == placed.stages - 1

    def peak(self, layout: Layout, rank: int, microbatches: int) -> Footprint:
        """Return the bytes that pipeline rank `rank` needs in a step of `microbatches`
        microbatches.

        The result is the largest memory during any op of the rank (an op is, for example, the
        forward or the backward of one microbatch). During an op, the rank needs the tensors that
        are kept for the microbatches in flight, the working memory of the op, and an activation and
        a gradient for each neighbouring stage.
        """
        kept, working = self._held(layout, rank, microbatches)
        weights, gradients, optimizer, host = self._state(layout, rank)
        copies = self.copies_bytes(layout, rank)
        return Footprint(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            activations=kept,
            working=_beside(self, layout, (rank, microbatches), kept=kept, working=working),
            runtime=self.runtime_bytes,
            copies=copies * self.on_host,
            host=host + copies * (not self.on_host),
        )

    def _held(self, layout: Layout, rank: int, microbatches: int) -> tuple[int, int]:
        """Find the op during which a rank needs the most memory, and return two numbers of bytes:
        the tensors that are kept for the microbatches in flight at this time, and the working
        memory of the op."""
        key = (rank, _flight_key(layout, microbatches))
        if key not in self._flights:
            if len(self._flights) > MOST_FLIGHTS:
                self._flights.clear()
            self._flights[key] = self._in_flight(layout, rank, microbatches)
        return self._flights[key]

    def _in_flight(self, layout: Layout, rank: int, microbatches: int) -> tuple[int, int]:
        examples, alike = self.sorts(Cut.of(layout), layout.recompute_layers, rank)
        order = RankOrder(
            kind=layout.schedule,
            pipeline=layout.pipeline,
            virtual=layout.virtual,
            microbatches=microbatches,
            rank=rank,
        )
        flight = fullest_alike(order, alike)
        keeps = [
            self.stages.stored_bytes[name](layout, examples[like]) for name, like in flight.stores
        ]
        works = {NOTHING: 0}
        for moment in flight.moments:
            if moment.working not in works:
                name, like = moment.working
                works[moment.working] = self.stages.needed_bytes[name](layout, examples[like])
        moments = (
            (sum(map(mul, moment.held, keeps)), works[moment.working]) for moment in flight.moments
        )
        return max(moments, key=sum)

    def largest(self, layout: Layout, microbatches: int) -> tuple[int, Footprint]:
        """Return the pipeline rank that needs the most memory, and its memory at its peak."""
        peaks = [(r, self.peak(layout, r, microbatches)) for r in self.distinct_ranks(layout)]
        return max(peaks, key=lambda peak: peak[1].total)

    def fits(self, layout: Layout, microbatches: int, capacity_bytes: float) -> bool:
        """Return True if every pipeline rank needs at most `capacity_bytes` bytes.

        The method makes up to three checks. The first check counts only the state, and the second
        check adds a lower bound of the activations. These two checks are fast, and already exclude
        most layouts of a large model. Only the third check computes the complete memory.
        """
        room = capacity_bytes - self.runtime_bytes
        ranks, cut = self.distinct_ranks(layout), Cut.of(layout)
        standing = self._stands(cut, layout.tensor, _how(layout), ranks)
        if self.on_host and self.method.copies:
            copies = (self.copies_bytes(layout, rank) for rank in ranks)
            standing = [own + copied for own, copied in zip(standing, copies, strict=True)]
        if max(standing) > room:
            return False
        least = self._least_held(layout, ranks, microbatches)
        if any(stands + kept > room for stands, kept in zip(standing, least, strict=True)):
            return False
        return all(
            stands + kept + _beside(self, layout, key, kept=kept, working=working) <= room
            for rank, stands in zip(ranks, standing, strict=True)
            for key in ((rank, microbatches),)
            for kept, working in (self._held(layout, *key),)
        )

    def _least_held(
        self, layout: Layout, ranks: tuple[int, ...], microbatches: int
    ) -> Iterator[int]:
        """Yield, for each pipeline rank in `ranks`, a lower bound of the bytes of activations that
        the rank keeps at its peak. Before the first op that frees memory, the rank runs at least a
        known number of forwards (`ahead` of the schedule). Each of them keeps at least the
        activations of the rank's smallest stage. The bound is the product of both numbers. It is
        fast to compute, because the ops are not visited one by one."""
        shared = _flight_key(layout, microbatches)
        for rank in ranks:
            key = (rank, shared)
            if key not in self._least_flights:
                sizes = (layout.pipeline, layout.virtual, microbatches)
                stages, _ = self.sorts(Cut.of(layout), layout.recompute_layers, rank)
                stored = self.stages.stored_bytes[ACTIVATIONS]
                each = min(stored(layout, stage) for stage in stages)
                self._least_flights[key] = KINDS[layout.schedule].ahead(rank, *sizes) * each
            yield self._least_flights[key]

    def uses_host(self, layout: Layout) -> bool:
        """Return True if ranks store state, or copies of state, in host memory that is separate
        from the device's memory."""
        return not self.on_host and (layout.offload != "none" or self.method.copies > 0)

    def host_bytes(self, layout: Layout, rank: int) -> int:
        """Return the host memory, in bytes, that a rank needs for its offloaded state and for
        in-memory copies of the state. `rank` is its pipeline rank. Only host memory that is
        separate from the device's memory is counted."""
        copies = self.copies_bytes(layout, rank)
        return self._state(layout, rank).host + copies * (not self.on_host)

    def copies_bytes(self, layout: Layout, rank: int) -> int:
        """Return the bytes, on one rank, of the copies of the training state that nodes keep in
        memory (so that a failed run can continue without reading a disk). `rank` is the rank's
        coordinate on the pipeline axis. Ranks that have the same state divide its copy evenly."""
        method = self.method
        if not method.copies:
            return 0
        each = method.copied_numbers(layout.data)
        numbers = each * self.stages.trained(layout, rank)
        if method.matrices:  # Muon stores one moment fewer for each element of a matrix
            fewer = replace(method, moments=method.moments - 1).copied_numbers(layout.data)
            (work,) = self.stages.dealt(Cut.of(layout), layout.tensor, rank, Sharing())
            numbers -= (each - fewer) * work.elements
        holders = layout.copies
        return method.copies * -(-numbers * self.wide_bytes // holders)

    def _state(self, layout: Layout, rank: int) -> "StateBytes":
        """Return the bytes of a pipeline rank's weights, gradients and optimizer state, on its
        device and on its host."""
        return self._standing(Cut.of(layout), layout.tensor, rank, _how(layout))

    def gradient_bytes(self, layout: Layout, rank: int) -> int:
        """Return the bytes of a pipeline rank's gradients."""
        return self._state(layout, rank).gradients

    def _counted_stands(
        self, cut: Cut, tensor: int, how: tuple[Sharing, str], ranks: tuple[int, ...]
    ) -> list[int]:
        """Return the bytes of state on the device, for each pipeline rank in `ranks`."""
        return [self._standing(cut, tensor, rank, how).on_device for rank in ranks]

    def _counted_standing(
        self, cut: Cut, tensor: int, rank: int, how: tuple[Sharing, str]
    ) -> "StateBytes":
        """Return the bytes of a pipeline rank's state, which is sharded and offloaded according to
        `how` (the result of `_how`). The padding of buffers is ignored. If the compute type is the
        type of the master weights, no separate master weights are counted."""
        sharing, offload = how
        every, train, shared = self.stages.elements_of(cut, tensor, rank)
        # A tied table has one weight and one optimizer state. But it may have two gradients, one of
        # the embedding and one of the head, until these are summed.
        second = shared * self.software.tied_gradients_apart
        counts = (train, train + second, train + second, train)
        weights, summed, widened, optimizer = (
            -(-count // shards) * each
            for count, shards, each in zip(counts, _shards(sharing), self._each_bytes, strict=True)
        )
        weights += self.stages.frozen_bytes(
            cut, tensor, rank, frozen=every - train, shards=sharing.weight_shards
        )
        # Muon stores one value fewer for each element of a matrix. Therefore the rank whose shard
        # has the fewest elements of matrices has the most state, and this rank is counted.
        if self.method.matrices:
            fewest = min(work.elements for work in self.stages.dealt(cut, tensor, rank, sharing))
            optimizer -= fewest * self.wide_bytes
        # If the host updates the weights, it needs a buffer for each parameter's gradient. Without
        # separate master weights, it also needs a buffer for each parameter's weight.
        rooms = (1 + (self.compute_bytes >= FLOAT32.bytes)) * self.wide_bytes
        rooms *= -(-train // sharing.state_shards)
        held, host = _placed(offload, optimizer, rooms, self.on_host)
        return StateBytes(weights, summed + widened, held, host)

    @cached_property
    def _each_bytes(self) -> tuple[int, int, int, int]:
        """Return four sizes in bytes for one parameter: its weight, its gradient, the gradient's
        float32 copy (0 unless gradients are summed in fp16 or bf16), and its optimizer state. The
        optimizer state includes a separate master weight if weights are in a 16-bit type."""
        summed, wide = self.software.gradient_bytes, self.wide_bytes
        widened = FLOAT32.bytes if summed < FLOAT32.bytes else 0
        state = self.method.kinds + (self.compute_bytes < FLOAT32.bytes)
        return self.compute_bytes, max(summed, self.compute_bytes), widened, state * wide

    def parameter_bytes(self, layout: Layout) -> float:
        """Return a lower bound of the bytes that a rank of `layout` needs per parameter for
        weights, gradients and optimizer state."""
        weights, summed, widened, optimizer = (
            each / shards
            for shards, each in zip(_shards(layout.sharing), self._each_bytes, strict=True)
        )
        optimizer -= self.method.matrices * self.wide_bytes / layout.shards
        return weights + summed + widened + optimizer * (layout.offload == "none")

    def least_frozen_bytes(
        self, layout: Layout, elements: float, layers: float, tensor: int
    ) -> float:
        """Return a lower bound of the bytes that frozen weights take on one of `tensor`
        tensor-parallel ranks. The rank has `elements` frozen weights. If the model is quantized,
        the frozen weights of `layers` layers are counted as quantized."""
        packed, packed_bytes = frozen_layer(self.model, tensor)
        in_full = (elements - layers * packed) * self.compute_bytes
        return in_full / layout.sharing.weight_shards + layers * packed_bytes

    def beside_bytes(self, layout: Layout, rank: int) -> int:
        """Return the bytes that every backward of a rank needs in addition to its own working
        memory: an activation and a gradient in transit for each neighbouring stage, and, if the
        state is sharded, temporary whole gradients and weights."""
        stages = placement_of(layout).stages_of(rank)
        # `sides` is the number of directions in which the rank has neighbouring stages: previous
        # and next. A rank with several stages may have both, even if it has the model's first or
        # last stage.
        sides = any(s > 0 for s in stages) + any(s + 1 < layout.stages for s in stages)
        around = 2 * sides * self.stages.parts(layout).sizes.boundary_bytes
        return around + self._whole_bytes(layout, rank)

    def _whole_bytes(self, layout: Layout, rank: int) -> int:
        """Return the bytes of unsharded gradients and weights that a rank has temporarily. A place
        is the embedding, a layer or the head. Under ZeRO 2 and 3, the rank has the gradient of a
        place until the reduce-scatter of this gradient ends. Under ZeRO 3, the rank also has the
        gathered weights of the current place and of the next place."""
        if not layout.shards_gradients:
            return 0
        place, pair, whole = self.stages.largest_places(Cut.of(layout), layout.tensor, rank)
        gradient = max(self.software.gradient_bytes, self.compute_bytes)
        # On a GPU, the reduce-scatter of a place's gradient overlaps with the computation of the
        # next place, so the gradients of two places are in memory at the same time.
        gradients = place if self.on_host else pair
        if self.software.zero_unit == "tensor":
            gradients += place  # list collectives of torch copy the whole tensor
        return gradients * gradient + whole * self.compute_bytes * layout.shards_weights


def _flight_key(layout: Layout, microbatches: int) -> tuple[object, ...]:
    """Return the settings of a layout that determine the memory of a pipeline rank's ops. The
    settings are the key of a cache of this memory. Sharding is not among them, so a search that
    tries several shardings of a layout computes the memory only once."""
    sizes = (layout.dealing, layout.pipeline, layout.virtual, layout.first_layers)
    how = (layout.schedule, layout.recompute, layout.recompute_layers)
    return activation_key(layout), *sizes, *how, microbatches


def _beside(
    memory: MemoryModel, layout: Layout, at: tuple[int, int], *, kept: int, working: int
) -> int:
    """Return the working memory of a rank, in bytes, in addition to the `kept` bytes of
    activations. `at` is (pipeline rank, microbatches of a step).

    The result is the larger of two amounts of memory, which are needed at different times. The
    first amount is needed during a backward: the working memory of the op (`working`),
    `beside_bytes`, and, with `run.reproducible`, sums of gradients in a binary tree. The second
    amount is needed after the last backward: the memory of the messages between data-parallel
    ranks, of further sums in this tree, or of an update of whole matrices. At that time, the `kept`
    bytes of the activations are free again, so they are subtracted from the second amount.

    If the messages overlap with the computation of the next step, their memory is added to the
    first amount. In decentralized training, copies of the neighbours' weights (`copies_bytes` of
    the method) are always added.
    """
    rank, microbatches = at
    method = memory.method
    sizes = (layout.data, memory.stages.trained(layout, rank), memory.wide_bytes)
    messages, copies = method.room_bytes(*sizes, memory.tile), method.copies_bytes(*sizes)
    working += memory.beside_bytes(layout, rank)
    if method.reproducible:
        during, after = tree.most_sums(microbatches, layout.data)
        each = memory.gradient_bytes(layout, rank)
        # The gradient of a microbatch is added to the tree after its backward. Without a pipeline,
        # the activations are free at that time.
        free = kept if layout.pipeline == 1 else 0
        working = max(working + during * each, after * each - free)
    if method.matrices:
        how = (Cut.of(layout), layout.tensor, rank, layout.sharing)
        size, widens = memory.compute_bytes, memory.software.wide_products
        room = max(
            work.room_bytes(layout.tensor, size, widens=widens)
            for work in memory.stages.dealt(*how)
        )
        # During the update, the `kept` bytes of activations are free.
        working = max(working, room - kept)
    if method.section.overlap:
        return copies + working + messages
    return copies + max(working, messages - kept)
