"""Zero-bubble schedules, which split each backward into two ops and compute weight gradients at
times when a rank would otherwise be idle.

A rank may delay its weight gradients, because no other rank waits for them (Qi et al. 2023, arXiv
2401.10241; Qi et al. 2024, arXiv 2405.15362). The op I is the part of a backward that computes the
gradient of the stage's input. The op W is the part that computes the gradients of the stage's
weights. The docstrings of this module state properties of the schedules, which are from these
papers. Unlike in the papers, the end of the step is synchronous in this trainer: the gradients of
all ranks are summed before any rank updates its weights.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from ptdmpi.plan.schedule.ops import FORWARD, INPUT, WEIGHT, Op


def zb_h1(rank: int, chunks: Sequence[int], pipeline: int, microbatches: int) -> Iterator[Op]:
    """Yield the ops of the schedule ZB-H1, which is 1F1B with delayed weight-gradient ops W (Qi et
    al. 2023, section 2.3, Figure 3, top).

    There are p ranks and m microbatches. Rank r starts with p - r - 1 forwards, as in 1F1B. After
    the I of microbatch i, rank r runs the W of microbatch i - r. So each rank stores the tensors of
    at most p microbatches whose W is not done yet, which is as much as rank 0 stores in 1F1B. Let
    F, I and W be the times of a forward, of an op I and of an op W. If W <= I and p <= m, a rank is
    idle for (p - 1) (F + I - W).
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
    """Return the rank of `stage` in a V-shaped placement on p = `pipeline` ranks. The first p
    stages are on ranks 0 to p - 1, and the next p stages on ranks p - 1 to 0.

    Rank r has the stages r and 2 p - 1 - r, so rank 0 has the first and the last stage (Qi et al.
    2024, section 3, "V-shape").
    """
    place = stage % (2 * pipeline)
    return min(place, 2 * pipeline - 1 - place)


def zb_v(rank: int, chunks: Sequence[int], pipeline: int, microbatches: int) -> Iterator[Op]:
    """Yield the ops of the schedule ZB-V (Qi et al. 2023, section 6), with two chunks per rank in
    the V-shaped placement `on_a_v`.

    With p ranks, each rank stores the tensors of at most 2 p forwards whose W is not done yet. Each
    forward computes one of the two chunks of a rank, so this is as much memory as rank 0 needs in
    1F1B. If a forward (F), I and W take the same time, and there are at least p microbatches, a
    rank is idle for little more than (p - 1) F. After this time the first microbatch reaches the
    last rank.
    """
    yield from _on_the_v(pipeline, microbatches)[rank]


@lru_cache(maxsize=64)
def _on_the_v(pipeline: int, microbatches: int) -> tuple[tuple[Op, ...], ...]:
    """Return the orders of ops of `zb_v` for all ranks. The orders result from a simulation in
    which all ops take the same time, and in which each rank chooses its next op with
    `_Rank.choose`."""
    ranks = [_Rank(r, pipeline, microbatches) for r in range(pipeline)]
    ended: set[Op] = set()
    while any(rank.left for rank in ranks):
        for op in [rank.choose(ended) for rank in ranks]:  # all ranks choose before any op ends
            if op is not None:
                ranks[on_a_v(op.stage, pipeline, 2)].take(op)
                ended.add(op)
    return tuple(tuple(rank.order) for rank in ranks)


class _Rank:
    """One rank of the schedule ZB-V while the order of its ops is built, and the rule by which the
    rank chooses its next op."""

    def __init__(self, rank: int, pipeline: int, microbatches: int) -> None:
        self.down, self.up = rank, 2 * pipeline - 1 - rank
        self.last, self.most, self.microbatches = 2 * pipeline - 1, 2 * pipeline, microbatches
        self.order: list[Op] = []
        self.held = 0
        # the number of ops (F, I and W of both stages) that are not in the order yet
        self.left = 6 * microbatches
        self.next = {(k, s): 0 for k in (FORWARD, INPUT, WEIGHT) for s in (self.down, self.up)}

    def choose(self, ended: set[Op]) -> Op | None:
        """Return the op that the rank starts next, when the ops in `ended` are done. Return None if
        no op can start.

        An op I (gradient of the input) has the highest priority, because other ranks wait for it,
        and because the op W (gradients of the weights), which frees memory, can run only after I.
        Forwards have the second priority. Forwards of the second chunk come before forwards of the
        first chunk, because the second chunk is nearer to the loss. An op W runs only if no other
        op can start.
        """
        # the memory for one forward is reserved for the second chunk. If forwards of the first
        # chunk filled all memory, no microbatch could reach the loss, and no backward could begin
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
        # the same rule as in `Schedule.needs`, which cannot be called before the orders are built
        needs = [Op(kind, op.stage, op.microbatch) for kind in op.row.after]
        source = op.stage + op.row.neighbour
        if op.row.neighbour and 0 <= source <= self.last:
            needs.append(Op(op.kind, source, op.microbatch))
        return all(need in ended for need in needs)

    def take(self, op: Op) -> None:
        """Append `op`, which `choose` has returned, to the order of the rank's ops."""
        self.order.append(op)
        self.left -= 1
        self.next[op.kind, op.stage] += 1
        # a stage keeps a microbatch's activations from F to I, and the operands of W from I to W
        self.held += (op.kind == FORWARD) - (op.kind == WEIGHT)
