"""How layers are dealt to stages: every layer once, and the slowest rank as fast as can be."""

import heapq
import itertools
import math
from functools import lru_cache

from ptdmpi.config import Layout, ModelConfig
from ptdmpi.plan.shape.flops import head_forward_flops, layer_forward_flops

DECIMALS = 9  # of a work in layers: less is rounding


def head_in_layers(model: ModelConfig, vocab_size: int) -> float:
    """Work of the output head over that of one layer, in FLOPs."""
    return head_forward_flops(model, vocab_size) / layer_forward_flops(model)


def stages_of(layout: Layout, rank: int) -> range:
    """The stages of one pipeline rank, ascending."""
    return range(rank, layout.stages, layout.pipeline)


def split_model(
    model: ModelConfig, vocab_size: int, layout: Layout, balanced: bool = True
) -> list[range]:
    """The layers of each stage of a layout; `balanced`: the output head counts as layers."""
    head = head_in_layers(model, vocab_size) if balanced else 0.0
    return split_layers(model.layers, layout.pipeline, layout.virtual, head)


def split_layers(layers: int, pipeline: int, virtual: int, head: float) -> list[range]:
    """The layers of each of p v stages, in order; `head` is the head's work in layers.

    Only the last stage differs, by the head's work, so it may hold fewer layers than the others.
    Least is, in this order: the largest work of a rank, the largest work of a stage, the distance
    from the even split. Every stage keeps at least one layer.
    """
    return list(_split(layers, pipeline, virtual, head))


@lru_cache(maxsize=4096)
def _split(layers: int, pipeline: int, virtual: int, head: float) -> tuple[range, ...]:
    stages = pipeline * virtual
    if stages == 1:
        return (range(layers),)

    def cost(last: int) -> tuple[float, ...]:
        base, odd = divmod(layers - last, stages - 1)
        largest = max(base + (odd > 0), last + head)
        rank = _largest_rank(base, odd, (pipeline, virtual), last + head)
        return round(rank, DECIMALS), largest, abs(last - layers / stages), -last

    # a last stage above the even split does better with one layer less, and another one with it
    last = min(range(1, -(-layers // stages) + 1), key=cost)
    counts = [*_spread(layers - last, stages - 1, pipeline, last + head), last]
    ends = itertools.accumulate(counts)
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def _largest_rank(base: int, odd: int, sizes: tuple[int, int], last_work: float) -> float:
    """What `_spread` leaves the most loaded rank with. k odd layers each to the other ranks, the
    rest of them to the last one: k as small as leaves that one with no more than the others."""
    pipeline, virtual = sizes
    own, others = (virtual - 1) * base + odd + last_work, pipeline - 1
    if not others:
        return own
    least = -(-max(0, odd - virtual + 1) // others)
    level = math.ceil((own - virtual * base) / pipeline)
    choices = {min(max(k, least), virtual) for k in (level - 1, level)}
    return min(max(virtual * base + k, own - min(odd, k * others)) for k in choices)


def _spread(layers: int, stages: int, pipeline: int, last_work: float) -> list[int]:
    """`layers` over the stages before the last one; the odd ones go to the least loaded ranks, each
    rank's first stages first."""
    base, odd = divmod(layers, stages)
    counts = [base] * stages
    loads = [float(base * len(range(rank, stages, pipeline))) for rank in range(pipeline)]
    loads[stages % pipeline] += last_work
    free = [(loads[rank], rank) for rank in range(min(pipeline, stages))]  # (load, its next stage)
    heapq.heapify(free)
    for _ in range(odd):
        load, stage = heapq.heappop(free)
        counts[stage] += 1
        if stage + pipeline < stages:
            heapq.heappush(free, (load + 1, stage + pipeline))
    return counts
