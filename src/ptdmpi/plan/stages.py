"""How layers are dealt to stages: every layer once, and the slowest rank as fast as can be."""

from functools import lru_cache

from ptdmpi.config import ModelConfig
from ptdmpi.plan.costs import head_forward_flops, layer_forward_flops


def head_in_layers(model: ModelConfig, vocab_size: int) -> float:
    """Work of the output head over that of one layer, in FLOPs."""
    return head_forward_flops(model, vocab_size) / layer_forward_flops(model)


def split_layers(layers: int, pipeline: int, virtual: int, head: float) -> list[range]:
    """The layers of each of p v stages, in order; `head` is the head's work in layers.

    Only the last stage differs, by the head's work, so it may hold fewer layers than the others.
    Least is, in this order: the largest work of a rank, the largest work of a stage, the distance
    from the even split. Every stage keeps at least one layer.
    """
    return list(_split(layers, pipeline, virtual, head))


@lru_cache(maxsize=256)
def _split(layers: int, pipeline: int, virtual: int, head: float) -> tuple[range, ...]:
    stages = pipeline * virtual
    if stages == 1:
        return (range(layers),)
    even = layers / stages
    choices = []
    for last in range(1, layers - stages + 2):
        counts = [*_spread(layers - last, stages - 1, pipeline, last + head), last]
        works = [*counts[:-1], last + head]
        ranks = [sum(works[rank::pipeline]) for rank in range(pipeline)]
        choices.append(((max(ranks), max(works), abs(last - even)), counts))
    _, counts = min(choices)
    starts = [sum(counts[:i]) for i in range(stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def _spread(layers: int, stages: int, pipeline: int, last_work: float) -> list[int]:
    """`layers` over the stages before the last one; the odd ones go to the least loaded ranks."""
    base, odd = divmod(layers, stages)
    counts = [base] * stages
    load = [0.0] * pipeline
    for stage in range(stages):
        load[stage % pipeline] += base
    load[stages % pipeline] += last_work
    for _ in range(odd):
        free = [stage for stage in range(stages) if counts[stage] == base]
        chosen = min(free, key=lambda stage: (load[stage % pipeline], stage))
        counts[chosen] += 1
        load[chosen % pipeline] += 1
    return counts
