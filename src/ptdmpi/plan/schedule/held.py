"""The memory that a rank holds while it executes its ops (forwards and backwards of its stages on
microbatches) in order. All predictions of memory use the functions of this file."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ptdmpi.plan.schedule.ops import OP_KINDS, Op


class Held(NamedTuple):
    """The memory that a rank holds during `op` (including the op's working memory), and the memory
    that it holds after `op`."""

    op: Op
    during: float
    after: float


def held(
    order: Sequence[Op],
    size: Callable[[str, int], float],
    beside: Callable[[str, int], float] = lambda works, stage: 0,
) -> Iterator[Held]:
    """Yield, for each op of one rank's `order`, the memory that the rank holds during the op and
    after it. Before the first op, the rank holds no memory.

    An inventory is a set of tensors that a stage keeps for one microbatch, and `size(inventory,
    stage)` is the size of this set. `beside(works, stage)` is the size of an op's working memory,
    where `works` is the name in the op's row of `OP_KINDS`. The results have the unit of `size` and
    `beside`. If no op of the order frees an inventory, the inventory is in memory only during the
    op that makes it. This happens in validation, where a forward keeps nothing for a backward. If
    an op keeps one inventory and frees another, its working memory includes both inventories.
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


def most_held(order: Sequence[Op], size: Callable[[str, int], float]) -> float:
    """Return the largest memory that a rank holds while it executes the ops in `order`. The working
    memory of the ops is not counted. Return 0 if there are no ops. `size(inventory, stage)` is the
    size of an inventory, as in `held`."""
    return max((moment.during for moment in held(order, size)), default=0)
