"""The memory that a stage needs for one microbatch: the bytes that it keeps between its ops (such
as a forward and a backward), and the working memory of its ops."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import NamedTuple

from ptdmpi.config import Layout, ModelConfig
from ptdmpi.config.choices import RECOMPUTE_MODES
from ptdmpi.config.kinds import LayerKind, Runs
from ptdmpi.config.layout import Dealing
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.config.zero import Sharing
from ptdmpi.plan.layer import describe, folds
from ptdmpi.plan.layer.ahead import modules
from ptdmpi.plan.layer.folds import LayerBytes
from ptdmpi.plan.layer.operator import Operator
from ptdmpi.plan.layer.sizes import Sizes
from ptdmpi.plan.layout.stages import split_model
from ptdmpi.plan.machine.cluster import Software
from ptdmpi.plan.schedule.ops import ACTIVATIONS, OPERANDS
from ptdmpi.plan.schedule.orders import Placement, placement
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.dealt import Dealt, dealt
from ptdmpi.plan.shape.parameters import ModelPart, frozen_layer, frozen_places


@dataclass(frozen=True)
class PartBytes:
    """Bytes of activations of one microbatch, for each part of a model that a stage may contain.

    `layers` has the bytes of a layer, by kind. `loss_works` is the largest working memory of the
    head's backward, in addition to the bytes that the head keeps. `sent` is the bytes of the output
    for the next stage, if the stage keeps this output.
    """

    sizes: Sizes
    layers: dict[LayerKind, "KindBytes"]
    embedding: int
    head: int
    loss_works: int
    sent: int
    split: "SplitBytes"


@dataclass(frozen=True)
class KindBytes:
    """Bytes of activations of one microbatch in a layer of one kind.

    `modes` has the bytes by mode of recomputation. `idle` is the most bytes that the forward of
    such a layer needs if the layer has no backward. `operands` is the bytes of the operands that a
    split backward keeps, and `adds` is the working memory of W (gradients of the weights).
    """

    modes: dict[str, LayerBytes]
    idle: int
    operands: int
    adds: int


@dataclass(frozen=True)
class SplitBytes:
    """Bytes of the operands that a split backward of the embedding and of the head keeps from I
    (gradient of the input) to W (gradients of the weights), for one microbatch. `head_adds` is the
    working memory that W needs in addition to the operands of the head.
    """

    embedding: int
    head: int
    head_adds: int


class Cut(NamedTuple):
    """The properties of a layout that determine which part of the model each rank has. `placed` is
    the placement of stages on ranks. `first` is the number of layers in the first stage, or None if
    the planner chooses it. `dealing` is the distribution of experts over ranks."""

    placed: Placement
    first: int | None
    dealing: Dealing

    @classmethod
    def of(cls, layout: Layout) -> "Cut":
        """Return the properties of `layout` that determine which part of the model each rank
        has."""
        first, dealing = layout.first_layers, layout.dealing
        return _cut(layout.schedule, layout.pipeline, layout.virtual, first=first, dealing=dealing)


@lru_cache(maxsize=16384)
def _cut(schedule: str, pipeline: int, virtual: int, *, first: int | None, dealing: Dealing) -> Cut:
    return Cut(placement(schedule, pipeline, virtual), first, dealing)


class ActivationKey(NamedTuple):
    """The settings of a layout that determine the activations of a stage. `sends` is True if there
    are several stages, so that a stage sends its output."""

    tensor: int
    context: int
    context_method: str
    expert: int
    expert_tensor: int | None
    micro_size: int
    sequence_parallel: bool
    partition_activations: bool
    sends: bool


def activation_key(layout: Layout) -> ActivationKey:
    """Return the settings of `layout` that determine the activations of a stage."""
    return ActivationKey(
        tensor=layout.tensor,
        context=layout.context,
        context_method=layout.context_method,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        micro_size=layout.micro_size,
        sequence_parallel=layout.sequence_parallel,
        partition_activations=layout.partition_activations,
        sends=layout.pipeline > 1,
    )


class StageMemory:
    """The numbers of bytes and of parameters in the stages of one model. The program `software`
    trains the model in the compute type `precision`, on CPUs if `on_host` is True and on GPUs
    otherwise.

    A result that is the same for several layouts is computed only once. `runs_of` divides a range
    of layers into groups of neighbouring layers of the same kind. `layers_of` returns the layers of
    each stage of a `Cut`. `elements_of` returns three numbers of parameters of a pipeline rank (see
    `_counted_elements`).
    """

    def __init__(
        self,
        model: ModelConfig,
        vocab_size: int,
        precision: str,
        software: Software,
        *,
        on_host: bool = True,
    ) -> None:
        self.model, self.vocab_size, self.precision = model, vocab_size, precision
        self.software, self.on_host = software, on_host
        self._parts = cache(self._counted)
        self.runs_of = cache(model.runs)
        self.layers_of = cache(self._split)
        self._parts_of = cache(self._counted_parts)
        self.alike_parts = cache(self._counted_alike)
        self._part = cache(self._joined)
        self._after_idle = cache(self._counted_after_idle)
        self._part_elements = cache(partial(parameters.rank_elements, model, vocab_size))
        self.elements_of = cache(self._counted_elements)
        self.largest_places = cache(self._counted_places)
        # If the optimizer (Muon) updates whole matrices: (cut, tensor-parallel size, pipeline rank,
        # sharding) -> work of each rank of a shard group
        self.dealt = cache(self._counted_dealt)
        # An inventory is a group of tensors that are kept between ops (`OpKind.keeps`,
        # `OpKind.frees`). Name of an inventory -> function that returns its bytes for one
        # microbatch in a stage
        self.stored_bytes = {ACTIVATIONS: self.kept_bytes, OPERANDS: self.operand_bytes}
        # name of a kind of working memory (`OpKind.works`) -> function that returns its bytes for
        # an op in a stage
        self.needed_bytes = {
            "backward": self.working_bytes,
            "inputs": self.input_bytes,
            "weights": self.weight_bytes,
        }

    def split(self, layout: Layout) -> tuple[range, ...]:
        """Return, for each stage of `layout`, the range of its layers."""
        return self.layers_of(Cut.of(layout))

    def _split(self, cut: "Cut") -> tuple[range, ...]:
        balanced = self.software.balanced_stages
        return tuple(
            split_model(self.model, self.vocab_size, cut.placed, balanced=balanced, first=cut.first)
        )

    def stage_parts(self, layout: Layout) -> tuple[ModelPart, ...]:
        """Return the part of the model that each stage has on a tensor-parallel rank."""
        return self._parts_of(Cut.of(layout), layout.tensor)

    def _counted_parts(self, cut: Cut, tensor: int) -> tuple[ModelPart, ...]:
        layers = self.layers_of(cut)
        runs = map(self.runs_of, layers)
        return parameters.stage_parts([*runs], tensor=tensor, dealing=cut.dealing)

    def _counted_alike(
        self, cut: Cut, tensor: int
    ) -> tuple[tuple[ModelPart, ...], tuple[int, ...]]:
        """Return the different parts of the model that the stages of `cut` have on one of `tensor`
        tensor-parallel ranks, and for each stage the index of its part."""
        parts = self._parts_of(cut, tensor)
        numbers = {part: number for number, part in enumerate(dict.fromkeys(parts))}
        return tuple(numbers), tuple(numbers[part] for part in parts)

    def trained(self, layout: Layout, rank: int) -> int:
        """Return the number of trained parameters on a pipeline rank of `layout`."""
        return self.elements_of(Cut.of(layout), layout.tensor, rank)[1]

    def elements(self, layout: Layout, rank: int) -> int:
        """Return the number of parameters of a pipeline rank.

        A tied table is counted both on the rank with the first stage and on the rank with the last
        stage. If one rank has both stages, the table is counted only once.
        """
        return self.elements_of(Cut.of(layout), layout.tensor, rank)[0]

    def _counted_elements(self, cut: Cut, tensor: int, rank: int) -> tuple[int, int, int]:
        """Return three numbers for a pipeline rank: the number of all parameters, the number of
        trained parameters, and the number of parameters of a tied table that the rank uses twice
        (see `parameters.rank_elements`)."""
        return self._part_elements(self._part(cut, tensor, rank))

    def _joined(self, cut: Cut, tensor: int, rank: int) -> ModelPart:
        """Return the part of the model that a pipeline rank has."""
        parts = self._parts_of(cut, tensor)
        return ModelPart.joined([parts[stage] for stage in cut.placed.stages_of(rank)])

    def _backward(self, layout: Layout, stage: int) -> range:
        """Return the layers of a stage that have a backward. Layers without a backward keep no
        activations."""
        return self._after_idle(self.split(layout)[stage])

    def _counted_after_idle(self, own: range) -> range:
        """Return the layers of `own` that have a backward."""
        return own[self.model.idle(own) :]

    def frozen_bytes(self, cut: Cut, tensor: int, rank: int, *, frozen: int, shards: int) -> int:
        """Return the bytes of a pipeline rank's frozen weights. The rank has `frozen` of these
        weights, which are divided into `shards` shards.

        Quantized weights take the bytes of their codes and scales, which are not sharded.
        """
        elements, packed = frozen_layer(self.model, tensor)
        layers = self._part(cut, tensor, rank).layers
        in_full = -(-(frozen - layers * elements) // shards)
        return in_full * PRECISIONS[self.precision].compute.bytes + layers * packed

    def _counted_dealt(self, cut: Cut, tensor: int, rank: int, sharing: Sharing) -> list[Dealt]:
        """Return, for each rank of a shard group of pipeline rank `rank`, the matrices that Muon
        updates on this rank (see `plan.shape.dealt`)."""
        part = self._part(cut, tensor, rank)
        return dealt(self.model, self.vocab_size, part, sharing)

    def kept_bytes(self, layout: Layout, stage: int) -> int:
        """Return the bytes that one microbatch keeps in a stage from its forward to its backward.

        The input that a stage receives from the previous stage is counted as the input of the
        stage's first layer.
        """
        parts, own = self.parts(layout), self._backward(layout, stage)
        kept = 0
        for kind, mode, count in segments(self.runs_of(own), layout, own.start):
            kept += count * parts.layers[kind].modes[mode].kept
        if stage == 0:
            kept += parts.embedding
        if stage == layout.stages - 1:
            return kept + parts.head
        return kept + parts.sent

    def operand_bytes(self, layout: Layout, stage: int) -> int:
        """Return the bytes that a stage keeps for one microbatch after op I (the gradient of the
        input) until op W (the gradients of the weights)."""
        parts = self.parts(layout)
        split = parts.split
        runs = self.runs_of(self._backward(layout, stage))
        kept = sum(count * parts.layers[kind].operands for kind, count in runs)
        if stage == 0:
            kept += split.embedding
        if stage == layout.stages - 1:
            kept += split.head
        return kept

    def input_bytes(self, layout: Layout, stage: int) -> int:
        """Return the most bytes that a microbatch needs in a stage during the op I (gradient of the
        input).

        The op I frees activations and stores operands for W (gradients of the weights). The layer
        that is computed also needs its working memory. Neighbouring layers of one kind and mode of
        recomputation form a group. Each layer of a group changes the number of bytes by the same
        amount, so within a group the number is the largest in the first or in the last layer. The
        result is the maximum of these numbers, of the bytes at the loss, and of the bytes at the
        end of the op.
        """
        parts, own = self.parts(layout), self._backward(layout, stage)
        split, held = parts.split, self.kept_bytes(layout, stage)
        most = held + _forward_bytes(self, layout, stage)
        if stage == layout.stages - 1:
            most = held + parts.loss_works
            held += split.head - parts.head
        for kind, mode, count in reversed(list(segments(self.runs_of(own), layout, own.start))):
            layer = parts.layers[kind].modes[mode]
            grows = parts.layers[kind].operands - layer.kept
            works = held + layer.input_works
            most = max(most, works, works + (count - 1) * grows)
            held += count * grows
        ends = self.operand_bytes(layout, stage) + 2 * parts.sizes.boundary_bytes
        return max(most, ends)

    def weight_bytes(self, layout: Layout, stage: int) -> int:
        """Return the bytes that a stage's W (gradients of the weights) needs in addition to the
        operands."""
        parts, layers = self.parts(layout), self.split(layout)[stage]
        adds = max(parts.layers[trained_kind(run.kind)].adds for run in self.runs_of(layers))
        if stage == layout.stages - 1:
            return max(adds, parts.split.head_adds)
        return adds

    def working_bytes(self, layout: Layout, stage: int) -> int:
        """Return the most bytes that a stage's backward needs in addition to the kept activations.

        The peak is at the loss, or in the last layer of a group of neighbouring layers with the
        same kind and mode of recomputation. The backward begins with the last layer of a group.
        During the backward of an earlier layer of the group, the kept activations of later layers
        are already free.
        """
        parts, own = self.parts(layout), self._backward(layout, stage)
        most, freed = _forward_bytes(self, layout, stage), 0
        if stage == layout.stages - 1:
            most, freed = max(most, parts.loss_works), parts.head
        for kind, mode, count in reversed(list(segments(self.runs_of(own), layout, own.start))):
            layer = parts.layers[kind].modes[mode]
            most = max(most, layer.works - freed)
            freed += count * layer.kept
        return most

    def _counted_places(self, cut: "Cut", tensor: int, rank: int) -> tuple[int, int, int]:
        """Return three maxima for a pipeline rank. A place is the embedding, a layer or the head.
        The first is the largest number of elements of one place. The second is the largest number
        of elements of two adjacent places. The third is the same as the second, but includes frozen
        elements.

        The first two maxima are over trained elements only. Two places are in memory at the same
        time: the current place and the next place (`plan.schedule.places`). DeepSpeed of 2021
        gathers one tensor at a time, so for it all three numbers are the elements of the first
        linear layer of the MLP.
        """
        if self.software.zero_unit == "tensor":
            up = parameters.first_linear(self.model)
            return (up.inputs * sum(up.outputs) // tensor,) * 3
        parts = self._parts_of(cut, tensor)
        most = (0, 0, 0)
        for stage in cut.placed.stages_of(rank):
            held = parts[stage]
            sizes = [*map(sum, parameters.places(self.model, self.vocab_size, held)), 0]
            frozen = [*map(sum, frozen_places(self.model, self.vocab_size, held)), 0]
            every = [sum(both) for both in zip(sizes, frozen, strict=True)]
            pair, whole = (max(map(sum, itertools.pairwise(some))) for some in (sizes, every))
            most = (max(most[0], *sizes), max(most[1], pair), max(most[2], whole))
        return most

    def parts(self, layout: Layout) -> PartBytes:
        """Return the bytes of activations for each part of a model that a stage of `layout` may
        contain."""
        return self._parts(activation_key(layout))

    def _counted(self, key: ActivationKey) -> PartBytes:
        """Compute the bytes that the method `parts` returns, for all layouts with the settings
        `key`."""
        layout = Layout(
            key.tensor,
            1,
            1,
            micro_size=key.micro_size,
            sequence_parallel=key.sequence_parallel,
            partition_activations=key.partition_activations,
            context=key.context,
            context_method=key.context_method,
            expert=key.expert,
            expert_tensor=key.expert_tensor,
        )
        sizes = Sizes(self.model, layout, self.precision, self.software, on_host=self.on_host)
        kinds = {trained_kind(run.kind) for run in self.model.runs()}
        embedding = self._embedding()
        head = self._head()
        keeps_sent = key.sends and self.software.keeps_outputs
        return PartBytes(
            sizes=sizes,
            layers={kind: self._kind_bytes(kind, sizes) for kind in kinds},
            embedding=folds.kept_bytes(embedding, sizes),
            head=folds.kept_bytes(head, sizes),
            loss_works=folds.head_works(head, sizes),
            sent=sizes.boundary_bytes * keeps_sent,
            split=SplitBytes(
                embedding=folds.operand_bytes(embedding, sizes),
                head=folds.operand_bytes(head, sizes),
                head_adds=folds.adding_bytes(head, sizes),
            ),
        )

    def _kind_bytes(self, kind: LayerKind, sizes: Sizes) -> KindBytes:
        layer = describe.layer_of(self.model, kind)
        rows = folds.operators(layer)
        return KindBytes(
            modes={mode: folds.layer_bytes(layer, sizes, mode) for mode in RECOMPUTE_MODES},
            idle=folds.idle_bytes(rows, sizes),
            operands=folds.operand_bytes(rows, sizes),
            adds=folds.adding_bytes(rows, sizes),
        )

    def _embedding(self) -> tuple[Operator, ...]:
        """Return the operators of the embedding that have a backward: all operators, or no operator
        if the embedding has nothing to train."""
        rows = describe.embedding(self.model, self.vocab_size)
        if any(row.trains for row in rows):
            return rows
        return ()

    def _head(self) -> tuple[Operator, ...]:
        """Return the operators of the head that have a backward."""
        rows = modules.head(self.model, self.vocab_size)
        if self.model.idle() < self.model.layers:
            return rows
        first = next(i for i, row in enumerate(rows) if row.trains)
        return rows[first:]


def _forward_bytes(memory: StageMemory, layout: Layout, stage: int) -> int:
    """Return the bytes that the forwards of layers without a backward need in addition to the bytes
    that the stage keeps for a microbatch. The number is the maximum over these layers, because they
    run one after the other. The result is 0 if the stage has no such layer, or if the stage keeps
    more bytes than any of these layers needs."""
    layers = memory.runs_of(memory.split(layout)[stage])
    idle = {trained_kind(run.kind) for run in layers if run.kind.idle}
    if not idle:
        return 0
    parts = memory.parts(layout)
    most = max(parts.layers[kind].idle for kind in idle)
    return max(0, most - memory.kept_bytes(layout, stage))


def trained_kind(kind: LayerKind) -> LayerKind:
    """Return the kind of layer that equals `kind` but has a backward. The memory of a layer without
    a backward is stored under this kind."""
    return kind._replace(idle=False)


def segments(runs: Runs, layout: Layout, start: int) -> Iterator[tuple[LayerKind, str, int]]:
    """Yield (kind, mode of recomputation, number of layers) for each group of neighbouring layers
    of one kind and mode, in the order of the layers. `start` is the number of the first layer of
    `runs`. All layers in `runs` have a backward."""
    most = layout.recompute_layers if layout.recompute == "full" else None
    for kind, count in runs:
        recomputed = count if most is None else min(max(0, most - start), count)
        if recomputed:
            yield kind, layout.recompute, recomputed
        if recomputed < count:
            yield kind, "none", count - recomputed
        start += count
