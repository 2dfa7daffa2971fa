"""How layers are dealt to stages: every layer once, and the slowest rank as fast as can be."""

import heapq
import itertools
import math
from collections.abc import Mapping
from functools import lru_cache

from ptdmpi.config import Layout, ModelConfig
from ptdmpi.plan.schedule.orders import Placement, placement
from ptdmpi.plan.shape.flops import head_forward_flops, layer_forward_flops

DECIMALS = 9  # of a work in layers: less is rounding


def head_in_layers(model: ModelConfig, vocab_size: int) -> float:
    """Work of the output head over that of one layer, in FLOPs."""
    return head_forward_flops(model, vocab_size) / layer_forward_flops(model)


def placement_of(layout: Layout) -> Placement:
    """Where the stages of a layout stand."""
    return placement(layout.schedule, layout.pipeline, layout.virtual)


def split_model(
    model: ModelConfig,
    vocab_size: int,
    placed: Placement,
    balanced: bool = True,
    first: int | None = None,
) -> list[range]:
    """The layers of each stage; `balanced`: the output head counts as layers. `first`: of the first
    stage, None as is best."""
    head = head_in_layers(model, vocab_size) if balanced else 0.0
    return split_layers(model.layers, placed, head, first)


def split_layers(
    layers: int, placed: Placement, head: float, first: int | None = None
) -> list[range]:
    """The layers of each of p v stages, in order; `head` is the head's work in layers, `placed`
    says which rank holds which stage: v of them each.

    The last stage differs by the head's work, so it may hold fewer layers than the others, and the
    first one holds `first` where that is said. Least is, in this order: the largest work of a rank,
    the largest work of a stage, the distance from the even split. Every stage keeps at least one
    layer.
    """
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
        # rounded: of splits that differ by rounding alone the next reason decides
        return round(rank, DECIMALS), largest, abs(last - layers / stages), -last

    # a last stage above the even split does better with one layer less, and another one with it
    last = min(range(1, -(-layers // stages) + 1), key=cost)
    return _ranges([*_spread(layers - last, placed, {placed.stages - 1: last + head}), last])


def _ranges(counts: list[int]) -> tuple[range, ...]:
    ends = itertools.accumulate(counts)
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def _around(layers: int, placed: Placement, head: float, first: int) -> list[int]:
    """The layers of each stage where those of the first one are given."""
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
    if placed.virtual == 1:  # its rank has nothing else
        most = min(most, -(-(layers - first) // (stages - 1)))
    return dealt(min(range(1, most + 1), key=cost))


def _largest_rank(base: int, odd: int, sizes: tuple[int, int], last_work: float) -> float:
    """What `_spread` leaves the most loaded rank with: k odd layers each go to the ranks without
    the last stage, the rest of them to the one with it, and k is as small as leaves that one with
    no more than the others. `sizes` are p and v."""
    pipeline, virtual = sizes
    own, others = (virtual - 1) * base + odd + last_work, pipeline - 1
    if not others:
        return own
    least = -(-max(0, odd - virtual + 1) // others)
    level = math.ceil((own - virtual * base) / pipeline)
    choices = {min(max(k, least), virtual) for k in (level - 1, level)}
    return min(max(virtual * base + k, own - min(odd, k * others)) for k in choices)


def _spread(layers: int, placed: Placement, given: Mapping[int, float]) -> list[int]:
    """`layers` over the stages that have no work `given`, in order; the odd ones go to the least
    loaded ranks, each rank's first stages first."""
    others = [stage for stage in range(placed.stages) if stage not in given]
    base, odd = divmod(layers, len(others))
    counts = dict.fromkeys(others, base)
    free = []  # (load of a rank, the first of its stages that may take one more, the others)
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
