"""The space of a layout search: all legal layouts, and the settings that the search tries for each
layout."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ptdmpi.base.near import divisors
from ptdmpi.config.choices import (
    CHUNKS,
    CONTEXT_METHODS,
    OFFLOADS,
    RECOMPUTE_MODES,
    default_schedule,
)
from ptdmpi.config.layout import Layout
from ptdmpi.config.legality import (
    MOST_FORWARDS,
    breaks,
    chunk_rule,
    expert_groups,
    groups_need_zero,
    groups_to_shard,
    layout_mistakes,
    shards_of_a_node,
)
from ptdmpi.config.model import ModelConfig
from ptdmpi.config.zero import STAGES, covers_state
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.layer.legality import is_legal

# The largest numbers of chunks per rank and of stages. More chunks or stages would hardly shrink
# the bubble, but would add messages.
MOST_CHUNKS = 64
MOST_STAGES = 256
# The smallest number of positions of a sequence on a context-parallel rank. The search does not
# divide sequences into shorter parts. (Llama 3 cuts 131,072 positions into 16 parts: Dubey et al.
# 2024, arXiv 2407.21783, table 4.)
LEAST_POSITIONS = 8192


@dataclass(frozen=True)
class Space:
    """The settings of a layout search. A setting with a value is fixed; if a setting is None, the
    search chooses its value."""

    ranks: int
    schedule: str | None = None
    recompute: str | None = None
    recompute_layers: int | None = None  # number of recomputed layers if `recompute` is "full"
    sequence_parallel: bool | None = None
    scatter_gather: bool | None = None
    first_layers: int | None = None
    uneven: bool = False  # If True, also try a shorter first stage and partial recomputation.
    zero: tuple[int, ...] = STAGES  # The stages of ZeRO that the search tries.
    shard_group: int | Literal["all", "node"] | None = None
    offload: str | None = None
    dp_overlap: bool = False
    partition_activations: bool = False
    # The legal sizes of the data axis; None means that all sizes are legal.
    data: tuple[int, ...] | None = None
    sequences: int = 1  # The number of sequences in a microbatch must be a multiple of this number.
    cuts_sequences: bool = True  # If True, also try layouts with context parallelism.
    # The context-parallel method; None means that the search chooses it.
    context_method: str | None = None
    deals_experts: bool = True  # If True, also try layouts that distribute experts over ranks.

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings `scatter_gather` and `dp_overlap` of all layouts that the function
        `groups` yields. (The function `variants` later also tries the other value of
        `scatter_gather`.)"""
        scatter_gather = self.scatter_gather is not False
        return {"scatter_gather": scatter_gather, "dp_overlap": self.dp_overlap}


def contradiction(space: Space) -> str:
    """Return a text that says which fixed settings of `space` contradict each other, or "" if a
    layout can have all of them."""
    group = None
    if isinstance(space.shard_group, int):
        group = space.shard_group
    schedule = space.schedule or "1f1b"
    plain = Layout(
        tensor=1,
        pipeline=1,
        data=space.ranks,  # every legal shard group has a size that divides this number
        virtual=CHUNKS.get(schedule, 1),
        schedule=schedule,
        recompute=space.recompute or "full",
        sequence_parallel=bool(space.sequence_parallel),
        partition_activations=space.partition_activations,
        shard_group=group,
    )
    mistakes = [[*layout_mistakes(replace(plain, zero=zero), None, None)] for zero in space.zero]
    if space.shard_group == "node" and not any(map(covers_state, space.zero)):
        mistakes = [[*lines, groups_need_zero("node")] for lines in mistakes]
    # the settings are possible if at least one stage of ZeRO has no contradiction
    fewest = min(mistakes, key=len)
    return "; ".join(fewest)


def contexts(space: Space, model: ModelConfig) -> list[int]:
    """Return the context-parallel sizes that the search tries, ascending from 1. Each size c
    divides a sequence into 2 c equal chunks, two for each context-parallel rank, and leaves each of
    these ranks at least `LEAST_POSITIONS` positions."""
    most = 1
    if space.cuts_sequences:
        most = model.seq_length // LEAST_POSITIONS
    return [1, *(size for size in range(2, most + 1) if model.seq_length % (2 * size) == 0)]


def expert_sizes(space: Space, model: ModelConfig, layout: Layout) -> list[tuple[int, int | None]]:
    """Return the pairs of values (expert, expert_tensor) that the search tries for a layout. The
    first value is the number of ranks over which experts are distributed (1: they are not
    distributed). This number divides the number of experts. The second value is None if all
    tensor-parallel ranks divide each expert, and 1 if experts are not divided."""
    if not space.deals_experts or not model.experts:
        return [(1, None)]
    # adapters are not supported if the tensor-parallel ranks have whole experts (expert_tensor = 1)
    ways = (None, 1) if layout.tensor > 1 and not model.adapt.adapts else (None,)
    return [
        (size, way)
        for way in ways
        for size in expert_groups(layout.changed(expert_tensor=way))
        if model.experts % size == 0
    ]


def context_methods(space: Space, context: int) -> tuple[str, ...]:
    """Return the context-parallel methods that the search tries for the context-parallel size
    `context`. If the size is 1, the method does not matter, and the result has only the default
    method."""
    if context == 1:
        return CONTEXT_METHODS[:1]
    if space.context_method is not None:
        return (space.context_method,)
    return CONTEXT_METHODS


def of_a_node(pricer: Pricer, layout: Layout) -> int:
    """Return the number of ranks in a shard group if `parallel.shard_group` is "node"."""
    near = pricer.cluster.node.devices // (layout.tensor * layout.expert_tokens)
    context = layout.context // layout.expert_context
    return shards_of_a_node(layout.data // layout.expert_data, near, context=context)


class Sharding(NamedTuple):
    """The sharding of a layout: the stage of ZeRO, the size of shard groups, and the memory that
    holds the optimizer's state."""

    zero: int = 0
    shard_group: int | None = None
    offload: str = "none"

    def of(self, layout: Layout) -> Layout:
        """Return a copy of `layout` with this sharding."""
        if self == (layout.zero, layout.shard_group, layout.offload):
            return layout
        zero, shard_group, offload = self
        return layout.changed(zero=zero, shard_group=shard_group, offload=offload)


def shardings(space: Space, pricer: Pricer, layout: Layout) -> list[Sharding]:
    """Return the shardings that the search tries for a layout. A shard group has all ranks with the
    same part of the model, or all such ranks on one node. The optimizer's state is stored on the
    device, or it is offloaded to the host's memory or to a disk, if the cluster file has the speed
    of this memory or disk. If no two ranks have the same part of the model, there is nothing to
    shard, and only the lowest stage of ZeRO is tried."""
    stages: list[tuple[int, int | None]] = [(min(space.zero), None)]
    if layout.copies > 1:
        shared = _shard_groups(space, pricer, layout)
        stages = [(zero, None) for zero in space.zero if not covers_state(zero)]
        stages += [(zero, group) for zero in space.zero if covers_state(zero) for group in shared]
    places: list[str] = ["none"]
    if space.offload is not None:
        places = [space.offload]
    else:
        known = [place for place in OFFLOADS[1:] if not pricer.cluster.lacks(place)]
        # if ranks compute on the host, offloading state to the host's memory would save nothing
        places += [place for place in known if place == "disk" or not pricer.cluster.on_host]
    ways = [Sharding(*stage, place) for stage, place in itertools.product(stages, places)]
    scheduled = replace(layout, schedule=space.schedule or layout.schedule)
    return [way for way in ways if not breaks(way.of(scheduled), "zero", "shard_group")]


def _shard_groups(space: Space, pricer: Pricer, layout: Layout) -> list[int | None]:
    """Return the sizes of shard groups to try, ascending; None means all ranks with the same part
    of the model. Groups of one rank are left out, because they would shard nothing."""
    legal = {*groups_to_shard(layout)} - {1}
    sizes = legal & _group_sizes(space, pricer, layout)
    return [None if size == layout.copies else size for size in sorted(sizes)]


def _group_sizes(space: Space, pricer: Pricer, layout: Layout) -> set[int]:
    """Return the sizes of shard groups that `space` allows, including sizes that are not legal for
    the layout."""
    if isinstance(space.shard_group, int):
        return {space.shard_group}
    sizes = {"all": layout.copies, "node": of_a_node(pricer, layout)}
    if space.shard_group is None:
        return set(sizes.values())
    return {sizes[space.shard_group]}


def sharding_words(layout: Layout, before: Layout | None = None) -> str:
    """Return the sharding of a layout as command-line options. The result has only the options that
    differ from those of the layout `before`. If `before` is None, the result has the options that
    differ from a layout without sharding."""
    before = before or Layout(1, 1, 1)
    words = []
    if layout.zero != before.zero:
        words.append(f"--zero {layout.zero}")
    if layout.shard_group != before.shard_group:
        words.append(f"--shard-group {layout.shard_group or 'all'}")
    if layout.offload != before.offload:
        words.append(f"--offload {layout.offload}")
    return ", ".join(words)


def groups(space: Space, pricer: Pricer) -> Iterator[Layout]:
    """Yield every legal layout with one chunk per rank. Each of these layouts represents all
    layouts that differ from it only in the number of chunks (see `chunked`)."""
    config = pricer.model.config
    batch = pricer.batch
    modes = RECOMPUTE_MODES
    if space.recompute is not None:
        modes = (space.recompute,)
    for tensor in divisors(math.gcd(space.ranks, config.heads)):
        parallel: tuple[bool, ...] = (False, True) if tensor > 1 else (False,)
        if space.sequence_parallel is not None:
            parallel = (space.sequence_parallel and tensor > 1,)
        rows = itertools.product(contexts(space, config), divisors(space.ranks // tensor))
        for context, pipeline in rows:
            data, rest = divmod(space.ranks // tensor, context * pipeline)
            # Checking these sizes before a layout is made saves time: if the batch is large, these
            # checks exclude most layouts.
            if rest or pipeline > config.layers or not data or batch % data:
                continue
            if space.data is not None and data not in space.data:
                continue
            for micro_size in divisors(batch // data):
                if micro_size % space.sequences:
                    continue
                sizes = (tensor, pipeline, data, 1, micro_size)
                base = Layout(*sizes, context=context, **space.settings)
                ways = itertools.product(
                    context_methods(space, context),
                    expert_sizes(space, config, base),
                    parallel,
                    modes,
                )
                for method, (expert, width), sequence_parallel, mode in ways:
                    layers = space.recompute_layers if mode == "full" else None
                    shared = mode == "full" and tensor > 1 and not sequence_parallel
                    layout = base.changed(
                        context_method=method,
                        expert=expert,
                        expert_tensor=width,
                        sequence_parallel=sequence_parallel,
                        recompute=mode,
                        recompute_layers=layers,
                        first_layers=space.first_layers if pipeline > 1 else None,
                        partition_activations=space.partition_activations and shared,
                    )
                    if is_legal(layout, config, batch):
                        yield layout


def chunked(space: Space, group: Layout, layers: int, batch: int) -> Iterator[Layout]:
    """Yield copies of the layout `group`, one for each number of chunks per rank that the search
    tries. `group` comes from the function `groups` and has one chunk per rank. The schedule of the
    yielded layouts is `space.schedule`, or, if this is None, the default schedule for the number of
    chunks. Without a pipeline, the only number of chunks is 1. The model has `layers` layers, and
    `batch` is the global batch."""
    most = 1
    if group.pipeline > 1:
        p = group.pipeline
        microbatches = group.microbatches(batch)
        ordered = MOST_FORWARDS // (p * microbatches)  # the same limit as in `plan.layer.legality`
        most = max(1, min(layers // p, MOST_CHUNKS, MOST_STAGES // p, ordered))
    for virtual in range(1, most + 1):
        kind = space.schedule or default_schedule(virtual)
        if chunk_rule(kind, virtual).broken:
            continue
        if (group.first_layers or 1) > layers - group.pipeline * virtual + 1:
            continue
        yield group.changed(virtual=virtual, schedule=kind)


def variants(space: Space, layout: Layout) -> Iterator[Layout]:
    """Yield the layout itself first. Then yield its variant with the schedule GPipe, and its
    variants in which messages between stages are not scattered over the tensor-parallel ranks. No
    variant needs less memory than the layout itself: GPipe keeps the activations of all
    microbatches, and without scattering each stage still receives the whole tensor."""
    yield layout  # if it does not fit, as in most cases, the search asks for no other
    kinds = [layout.schedule]
    scatters = [layout.scatter_gather]
    if layout.pipeline > 1 and space.schedule is None:
        kinds.append("gpipe")
    whole = layout.tensor > 1 and layout.pipeline > 1 and not layout.sequence_parallel
    if whole and space.scatter_gather is None:
        scatters.append(False)
    for kind, scatter in [*itertools.product(kinds, scatters)][1:]:
        yield layout.changed(schedule=kind, scatter_gather=scatter)


def uneven_firsts(space: Space, pricer: Pricer, layout: Layout) -> Iterator[Layout]:
    """Yield the layout itself, in which the layers are divided among the stages as evenly as
    possible. If `space.uneven` is True, also yield the layout with one layer fewer and with two
    layers fewer on the first stage. The first stage may need fewer layers, because it has the
    embedding and the most microbatches in flight."""
    yield layout
    if space.uneven and layout.pipeline > 1 and layout.first_layers is None:
        own = len(pricer.memory.stages.split(layout)[0])
        for first in range(max(1, own - 2), own):
            yield layout.changed(first_layers=first)


def least_recomputed(pricer: Pricer, space: Space, layout: Layout) -> Iterator[Layout]:
    """Find, by bisection, the smallest number of fully recomputed layers with which a layout fits
    into memory. `layout` recomputes nothing and does not fit. Yield the layout that recomputes this
    number of layers, beginning with the model's first layer. Yield nothing if the layout fits only
    with all layers recomputed, or does not fit at all."""
    shared = layout.tensor > 1 and not layout.sequence_parallel
    partitions = space.partition_activations and shared
    full = replace(layout, recompute="full", partition_activations=partitions)
    layers = pricer.model.config.layers
    if not is_legal(full, pricer.model.config, pricer.batch) or not pricer.fits(full):
        return
    fewest = 1
    most = layers
    while fewest < most:
        middle = (fewest + most) // 2
        if pricer.fits(replace(full, recompute_layers=middle)):
            most = middle
        else:
            fewest = middle + 1
    if most < layers:
        yield full.changed(recompute_layers=most)
