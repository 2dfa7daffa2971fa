"""The assignment of layers with unequal work to stages, for models in which only some layers have
experts."""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

from ptdmpi.plan.schedule.orders import Placement

HALVINGS = 60  # Number of steps of the bisection; each step halves the interval.
SLACK = 1e-9  # Largest relative rounding error that a sum of amounts of work may have.


@lru_cache(maxsize=4096)
def split_unlike(
    works: tuple[float, ...], placed: Placement, head: float, first: int | None = None
) -> tuple[range, ...]:
    """Return, for each stage in order, the range of its layers.

    `works` has the work of each layer (for example, in FLOPs), and `head` is the work of the head,
    in the same unit. The last stage also has the head. The first stage has `first` layers, unless
    `first` is None. Every stage has at least one layer. The split minimises the largest work of a
    stage. If ranks have several stages, layers are afterwards moved between neighbouring stages as
    long as this lowers the largest work of a rank.
    """
    start = first or 0
    count = placed.stages - (first is not None)
    sums = [0.0, *itertools.accumulate(works[start:])]
    most = _least_most(sums, count, head)
    ends = [start + end for end in _ends(sums, count, head, most)]
    if first is not None:
        ends = [first, *ends]
    if placed.virtual > 1:
        _even_ranks(works, placed, head, ends, fixed=int(first is not None))
    return tuple(itertools.starmap(range, itertools.pairwise([0, *ends])))


def _least_most(sums: Sequence[float], count: int, head: float) -> float:
    """Find the split of the layers into `count` stages in which the largest work of a stage is as
    small as possible. Return this largest work. `sums[i]` is the work of the first i layers
    together, and `head` is the work of the head, which is on the last stage."""
    low, high = 0.0, sums[-1] + head
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _lowest(sums, count, head, middle) is None:
            low = middle
        else:
            high = middle
    return high * (1 + SLACK)


def _lowest(sums: Sequence[float], count: int, head: float, most: float) -> list[int] | None:
    """Return the lowest possible end of each of `count` stages. The end of a stage is the number of
    the layer after the stage's last layer. No stage may have more work than `most`. Return None if
    no such split exists. Stages are filled from the last to the first. `sums[i]` is the work of the
    first i layers together, and `head` is the work of the head."""
    layers = len(sums) - 1
    ends = [layers]
    room = most - head
    for stage in range(count - 1, 0, -1):
        begin = ends[0]
        while begin > stage and sums[ends[0]] - sums[begin - 1] <= room:
            begin -= 1
        if begin == ends[0]:
            return None
        ends.insert(0, begin)
        room = most
    return ends if sums[ends[0]] <= room else None


def _ends(sums: Sequence[float], count: int, head: float, most: float) -> list[int]:
    """Return the end of each stage, which is the number of the layer after the stage's last layer.
    No stage has more work than `most`. For each k, the first k stages together have about the
    fraction k / `count` of all work. `sums[i]` is the work of the first i layers together, and
    `head` is the work of the head."""
    lowest = _lowest(sums, count, head, most)
    assert lowest is not None
    layers, whole = len(sums) - 1, sums[-1] + head
    ends: list[int] = []
    begin = 0
    for stage in range(1, count):
        share = whole * stage / count
        even = bisect_right(sums, share)
        if even > layers or sums[even] - share > share - sums[even - 1]:
            even -= 1
        reach = bisect_right(sums, sums[begin] + most) - 1
        highest = min(reach, layers - (count - stage))
        begin = min(max(even, lowest[stage - 1], begin + 1), highest)
        ends.append(begin)
    return [*ends, layers]


def _even_ranks(
    works: Sequence[float], placed: Placement, head: float, ends: list[int], *, fixed: int
) -> None:
    """Move single layers between neighbouring stages. `works` has the work of each layer, and
    `head` is the work of the head, which is on the last stage. `ends` has the number of the layer
    after each stage's last layer, and is changed in place. A layer is moved if the move lowers the
    largest work of a rank, or if the move leaves this maximum unchanged and lowers the largest work
    of a stage. The ends of the first `fixed` stages do not change."""
    sums = [0.0, *itertools.accumulate(works)]

    def cost() -> tuple[float, float]:
        stages = [sums[end] - sums[begin] for begin, end in itertools.pairwise([0, *ends])]
        stages[-1] += head
        ranks = (sum(stages[s] for s in placed.stages_of(r)) for r in range(placed.pipeline))
        return max(ranks), max(stages)

    least = cost()
    moves = list(itertools.product(range(fixed, len(ends) - 1), (1, -1)))
    moved = True
    while moved:
        moved = False
        for stage, step in moves:
            begin = ends[stage - 1] if stage else 0
            if not begin < ends[stage] + step < ends[stage + 1]:
                continue
            ends[stage] += step
            now = cost()
            if (now[0] * (1 + SLACK), now[1]) < least or (
                now[0] <= least[0] and now[1] * (1 + SLACK) < least[1]
            ):
                least, moved = now, True
            else:
                ends[stage] -= step
