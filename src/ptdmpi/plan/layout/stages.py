"""How layers are dealt to stages: every layer once, and the slowest rank as fast as can be."""

import heapq
import itertools
import math
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
    model: ModelConfig, vocab_size: int, placed: Placement, balanced: bool = True
) -> list[range]:
    """The layers of each stage; `balanced`: the output head counts as layers."""
    head = head_in_layers(model, vocab_size) if balanced else 0.0
    return split_layers(model.layers, placed, head)


def split_layers(layers: int, placed: Placement, head: float) -> list[range]:
    """The layers of each of p v stages, in order; `head` is the head's work in layers, `placed`
    says which rank holds which stage: v of them each.

    Only the last stage differs, by the head's work, so it may hold fewer layers than the others.
    Least is, in this order: the largest work of a rank, the largest work of a stage, the distance
    from the even split. Every stage keeps at least one layer.
    """
    return list(_split(layers, placed, head))


@lru_cache(maxsize=4096)
def _split(layers: int, placed: Placement, head: float) -> tuple[range, ...]:
    stages = placed.stages
    if stages == 1:
        return (range(layers),)
    sizes = (placed.pipeline, placed.virtual)

    def cost(last: int) -> tuple[float, ...]:
        base, odd = divmod(layers - last, stages - 1)
        largest = max(base + (odd > 0), last + head)
        rank = _largest_rank(base, odd, sizes, last + head)
        # rounded: of splits that differ by rounding alone the next reason decides
        return round(rank, DECIMALS), largest, abs(last - layers / stages), -last

    # a last stage above the even split does better with one layer less, and another one with it
    last = min(range(1, -(-layers // stages) + 1), key=cost)
    counts = [*_spread(layers - last, placed, last + head), last]
    ends = itertools.accumulate(counts)
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


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


def _spread(layers: int, placed: Placement, last_work: float) -> list[int]:
    """`layers` over the stages before the last one; the odd ones go to the least loaded ranks, each
    rank's first stages first."""
    last = placed.stages - 1
    base, odd = divmod(layers, last)
    counts = [base] * last
    free = []  # (load of a rank, the first of its stages that may take one more, the others)
    for rank in range(placed.pipeline):
        own = [stage for stage in placed.stages_of(rank) if stage != last]
        load = float(base * len(own)) + (last_work if placed.rank_of(last) == rank else 0.0)
        if own:
            free.append((load, own[0], own[1:]))
    heapq.heapify(free)
    for _ in range(odd):
        load, stage, others = heapq.heappop(free)
        counts[stage] += 1
        if others:
            heapq.heappush(free, (load + 1, others[0], others[1:]))
    return counts
