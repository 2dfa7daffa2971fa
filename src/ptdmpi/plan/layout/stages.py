"""The assignment of layers to stages. The work of a stage is the FLOPs of its layers (and of the
head, on the last stage). The assignment minimises the work of the rank that has the most work."""

import heapq
import itertools
import math
from collections.abc import Mapping
from functools import lru_cache

from ptdmpi.config import Layout, ModelConfig
from ptdmpi.plan.layout.unlike import split_unlike
from ptdmpi.plan.schedule.orders import Placement, placement
from ptdmpi.plan.shape.flops import (
    head_forward_flops,
    kind_forward_flops,
    layer_forward_flops,
)

DECIMALS = 9  # amounts of work (in units of layers) are rounded to this number of decimal places


def head_in_layers(model: ModelConfig, vocab_size: int) -> float:
    """Return the forward FLOPs of the output head divided by the forward FLOPs of one layer."""
    return head_forward_flops(model, vocab_size) / layer_forward_flops(model)


def placement_of(layout: Layout) -> Placement:
    """Return the placement of the stages of a layout."""
    return placement(layout.schedule, layout.pipeline, layout.virtual)


def split_model(
    model: ModelConfig,
    vocab_size: int,
    placed: Placement,
    *,
    balanced: bool = True,
    first: int | None = None,
) -> list[range]:
    """Return, for each stage, the range of its layers. `placed` has the rank of each stage.

    If `balanced` is True, the work of the output head counts when the layers are divided; otherwise
    it counts as 0. `first` is the number of layers in the first stage; if it is None, the best
    number is chosen.
    """
    if model.has_unlike_layers:
        head = head_forward_flops(model, vocab_size) if balanced else 0.0
        return [*split_unlike(_works(model), placed, head, first)]
    head = head_in_layers(model, vocab_size) if balanced else 0.0
    return split_layers(model.layers, placed, head, first)


@lru_cache(maxsize=64)
def _works(model: ModelConfig) -> tuple[float, ...]:
    """Return the forward FLOPs per token of each layer."""
    runs = ((kind_forward_flops(model, kind), count) for kind, count in model.runs())
    return tuple(flops for flops, count in runs for _ in range(count))


def split_layers(
    layers: int, placed: Placement, head: float, first: int | None = None
) -> list[range]:
    """Return, for each stage in order, the range of its layers.

    `head` is the work of the head in units of layers, and `placed` has the rank of each stage. The
    last stage also has the head, so it may hold fewer layers than other stages. The first stage
    holds `first` layers, unless `first` is None. The split minimises the largest work of a rank. If
    several splits are equally good, the split that also minimises the largest work of a stage is
    chosen. If several splits remain, the last stage of the chosen split has a number of layers as
    near as possible to the mean over all stages. Every stage has at least one layer."""
    return list(_split(layers, placed, head, first))


@lru_cache(maxsize=4096)
def _split(layers: int, placed: Placement, head: float, first: int | None) -> tuple[range, ...]:
    stages = placed.stages
    if stages == 1:
        return (range(layers),)
    if first is not None:
        return _ranges(_around(layers, placed, head, first))
    sizes = (placed.pipeline, placed.virtual)

    def cost(last: int) -> tuple[float, ...]:
        base, odd = divmod(layers - last, stages - 1)
        largest = max(base + (odd > 0), last + head)
        rank = _largest_rank(base, odd, sizes, last + head)
        # The work is rounded. If two splits differ only by rounding errors, the next criterion
        # therefore decides.
        return round(rank, DECIMALS), largest, abs(last - layers / stages), -last

    # The last stage also has the head, so it never needs more than layers / stages layers, rounded
    # up. If it had more, moving one of them to another stage would not make the split worse.
    last = min(range(1, -(-layers // stages) + 1), key=cost)
    return _ranges([*_spread(layers - last, placed, {placed.stages - 1: last + head}), last])


def _ranges(counts: list[int]) -> tuple[range, ...]:
    ends = itertools.accumulate(counts)
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def _around(layers: int, placed: Placement, head: float, first: int) -> list[int]:
    """Return the number of layers of each stage if the first stage has `first` layers. `head` is
    the work of the head in units of layers."""
    stages = placed.stages
    if stages == 2:
        return [first, layers - first]

    def dealt(last: int) -> list[int]:
        given = {0: float(first), stages - 1: last + head}
        return [first, *_spread(layers - first - last, placed, given), last]

    def cost(last: int) -> tuple[float, ...]:
        works = [*map(float, dealt(last))]
        works[-1] += head
        ranks = (sum(works[s] for s in placed.stages_of(r)) for r in range(placed.pipeline))
        return round(max(ranks), DECIMALS), max(works), abs(last - layers / stages), -last

    most = layers - first - (stages - 2)
    if placed.virtual == 1:  # each rank has one stage
        most = min(most, -(-(layers - first) // (stages - 1)))
    return dealt(min(range(1, most + 1), key=cost))


def _largest_rank(base: int, odd: int, sizes: tuple[int, int], last_work: float) -> float:
    """Return the work of the rank with the most work, in units of layers, if `_spread` divides the
    layers.

    The layers are divided among all stages except the last. Each of these stages gets `base`
    layers, and `odd` layers remain. Each rank without the last stage gets k of the remaining
    layers, and the rank with the last stage gets all others. With the smallest possible k, the rank
    with the last stage has no more work than the other ranks. `sizes` is (number of ranks, stages
    per rank), and `last_work` is the work of the last stage.
    """
    pipeline, virtual = sizes
    own, others = (virtual - 1) * base + odd + last_work, pipeline - 1
    if not others:
        return own
    least = -(-max(0, odd - virtual + 1) // others)
    level = math.ceil((own - virtual * base) / pipeline)
    choices = {min(max(k, least), virtual) for k in (level - 1, level)}
    return min(max(virtual * base + k, own - min(odd, k * others)) for k in choices)


def _spread(layers: int, placed: Placement, given: Mapping[int, float]) -> list[int]:
    """Divide `layers` layers among the stages that are not in `given`, and return the number of
    layers of each of these stages, in order. `given` has the work of all other stages, which get no
    layers here.

    The layers that remain after an even division go to the ranks with the least work. A rank gives
    them to its first stages, one layer to each.
    """
    others = [stage for stage in range(placed.stages) if stage not in given]
    base, odd = divmod(layers, len(others))
    counts = dict.fromkeys(others, base)
    # for each rank: (work of the rank, first stage of the rank that may take one more layer, other
    # stages of the rank that may take one more layer)
    free = []
    for rank in range(placed.pipeline):
        own = [stage for stage in placed.stages_of(rank) if stage not in given]
        load = sum(given.get(stage, float(base)) for stage in placed.stages_of(rank))
        if own:
            free.append((load, own[0], own[1:]))
    heapq.heapify(free)
    for _ in range(odd):
        load, stage, more = heapq.heappop(free)
        counts[stage] += 1
        if more:
            heapq.heappush(free, (load + 1, more[0], more[1:]))
    return list(counts.values())
