"""Zero-bubble orders: the backward is split, and the weights' gradients, for which nobody waits,
fill what would be idle (Qi et al. 2023, arXiv 2401.10241; Qi et al. 2024, arXiv 2405.15362).

I is the part of a backward that leads to the gradient of the stage's input, W the part that leads
to those of its weights. From the papers: what the orders must do. The end of the step is strict
here: every rank's gradients are summed before any rank updates.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from ptdmpi.plan.schedule.ops import FORWARD, INPUT, WEIGHT, Op


def zb_h1(rank: int, chunks: Sequence[int], pipeline: int, microbatches: int) -> Iterator[Op]:
    """ZB-H1 (Qi et al. 2023, section 2.3, Figure 3 above): as 1F1B, with each W put off.

    Rank r starts with p - r - 1 forwards, as 1F1B does, and is r microbatches late with its W, so
    that each rank holds at most p microbatches, in flight or waiting for their W: no more than
    rank 0. Where W takes no longer than I, and p <= m, the bubble is (p - 1) (F + I - W).
    """
    (stage,) = chunks
    warm_up = min(pipeline - rank - 1, microbatches)
    yield from (Op(FORWARD, stage, i) for i in range(warm_up))
    for i in range(microbatches):
        if i + warm_up < microbatches:
            yield Op(FORWARD, stage, i + warm_up)
        yield Op(INPUT, stage, i)
        if i >= rank:
            yield Op(WEIGHT, stage, i - rank)
    yield from (Op(WEIGHT, stage, i) for i in range(max(0, microbatches - rank), microbatches))


def on_a_v(stage: int, pipeline: int, virtual: int) -> int:
    """Down the ranks with the first p stages and up again with the next: rank r holds the stages r
    and 2 p - 1 - r, rank 0 both ends of the model (Qi et al. 2024, section 3, "V-shape")."""
    place = stage % (2 * pipeline)
    return min(place, 2 * pipeline - 1 - place)


def zb_v(rank: int, chunks: Sequence[int], pipeline: int, microbatches: int) -> Iterator[Op]:
    """ZB-V (Qi et al. 2023, section 6): two chunks per rank on a V, of which each rank holds at
    most 2 p microbatches' halves, in flight or waiting for their W, as 1F1B's rank 0 does.

    Where F, I and W take the same time, a rank with p <= m is idle for little more than it takes
    the first microbatch to come to the last rank: (p - 1) F.
    """
    yield from _on_the_v(pipeline, microbatches)[rank]


@lru_cache(maxsize=64)
def _on_the_v(pipeline: int, microbatches: int) -> tuple[tuple[Op, ...], ...]:
    """All ranks' orders of `zb_v`: what comes of its rules where every op takes equally long."""
    ranks = [_Rank(r, pipeline, microbatches) for r in range(pipeline)]
    ended: set[Op] = set()
    while any(rank.left for rank in ranks):
        for op in [rank.choose(ended) for rank in ranks]:  # all of them before any has ended
            if op is not None:
                ranks[on_a_v(op.stage, pipeline, 2)].take(op)
                ended.add(op)
    return tuple(tuple(rank.order) for rank in ranks)


class _Rank:
    """One rank of ZB-V as its order grows: what it has done, and by which rules it goes on."""

    def __init__(self, rank: int, pipeline: int, microbatches: int) -> None:
        self.down, self.up = rank, 2 * pipeline - 1 - rank
        self.last, self.most, self.microbatches = 2 * pipeline - 1, 2 * pipeline, microbatches
        self.order: list[Op] = []
        self.held = 0
        # F, I and W in each of two stages
        self.left = 6 * microbatches
        self.next = {(k, s): 0 for k in (FORWARD, INPUT, WEIGHT) for s in (self.down, self.up)}

    def choose(self, ended: set[Op]) -> Op | None:
        """The op to start when those that have `ended` are done, if any can. An I before all else,
        since ranks wait for it and it leads to what frees memory; then a forward, on the way up
        first, as that is nearer to the loss; a W where nothing else can be done."""
        # one place is kept for a forward on its way up: without it none could come to its I
        wanted = [(INPUT, self.down), (INPUT, self.up)]
        if self.held < self.most:
            wanted.append((FORWARD, self.up))
        if self.held < self.most - 1:
            wanted.append((FORWARD, self.down))
        wanted += [(WEIGHT, self.down), (WEIGHT, self.up)]
        for kind, stage in wanted:
            op = Op(kind, stage, self.next[kind, stage])
            if op.microbatch < self.microbatches and self._can_start(op, ended):
                return op
        return None

    def _can_start(self, op: Op, ended: set[Op]) -> bool:
        # `Schedule.needs`, for the schedule that does not exist before its orders do
        needs = [Op(kind, op.stage, op.microbatch) for kind in op.row.after]
        source = op.stage + op.row.neighbour
        if op.row.neighbour and 0 <= source <= self.last:
            needs.append(Op(op.kind, source, op.microbatch))
        return all(need in ended for need in needs)

    def take(self, op: Op) -> None:
        """Put `op`, that `choose` gave, behind the others."""
        self.order.append(op)
        self.left -= 1
        self.next[op.kind, op.stage] += 1
        # held of a stage: from F to I the activations, from I to W the operands
        self.held += (op.kind == FORWARD) - (op.kind == WEIGHT)
