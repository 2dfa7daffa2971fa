"""What a rank holds while it goes through its order: the one walk that all memory rests on."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ptdmpi.plan.schedule.ops import OP_KINDS, Op


class Held(NamedTuple):
    """How much a rank holds while `op` runs, what the op needs beside included, and afterwards."""

    op: Op
    during: float
    after: float


def held(
    order: Sequence[Op],
    size: Callable[[str, int], float],
    beside: Callable[[str, int], float] = lambda works, stage: 0,
) -> Iterator[Held]:
    """One rank's `order`, op by op, with what it holds, from nothing at its beginning.

    `size(inventory, stage)` is what one microbatch keeps there, `beside(works, stage)` what an op
    needs of that working memory while it runs, both in any one unit. What no op of the order frees
    is let go at the end of the op that made it: a forward without gradients keeps nothing. Of an op
    that both keeps and frees the working memory has what it trades.
    """
    freed = {(op.row.frees, op.stage) for op in order}
    now: float = 0
    for op in order:
        kind = OP_KINDS[op.kind]
        passing: float = 0
        traded: float = 0
        if kind.keeps:
            amount = size(kind.keeps, op.stage)
            if (kind.keeps, op.stage) in freed:
                now += amount
            else:
                passing = amount
        if kind.frees and kind.keeps:
            traded = size(kind.keeps, op.stage) + size(kind.frees, op.stage)
        during = now + passing - traded + (beside(kind.works, op.stage) if kind.works else 0)
        if kind.frees:
            now -= size(kind.frees, op.stage)
        yield Held(op, during, now)


def most_held(
    order: Sequence[Op],
    size: Callable[[str, int], float],
    beside: Callable[[str, int], float] = lambda works, stage: 0,
) -> float:
    """The most that a rank holds at any moment of its `order`; see `held`. 0 for no ops."""
    return max((moment.during for moment in held(order, size, beside)), default=0)
