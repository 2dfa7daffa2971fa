"""What a pipeline rank holds at once, in microbatches: the orders of a schedule, walked once for
all models and layouts that share them.

`held` walks an order with one set of sizes. A search asks for thousands of sizes under few orders:
here the few moments are found that can be the fullest whatever the sizes are.
"""

from collections.abc import Iterable
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from ptdmpi.plan.schedule.ops import OP_KINDS
from ptdmpi.plan.schedule.orders import order, placement

# In steady state within so many rounds of the pipeline; from there on ever the same, or, where all
# microbatches are kept, one round more holds p more of each.
ROUNDS = 3
NOTHING = -1


class Moment(NamedTuple):
    """While the stage `working` runs an op that needs working memory (`NOTHING`: none does): how
    many microbatches of each store the rank holds, those of the op among them."""

    working: int
    held: tuple[int, ...]


class Flight(NamedTuple):
    """`stores`: (inventory, stage) of all that a rank keeps, by stage; `moments`: those at which it
    may hold most, none of which has less of every store than another one."""

    stores: tuple[tuple[str, int], ...]
    moments: tuple[Moment, ...]


@lru_cache(maxsize=16384)
def fullest(kind: str, pipeline: int, virtual: int, microbatches: int, rank: int) -> Flight:
    """The moments of a step of the schedule `kind` at which pipeline rank `rank` may hold most."""
    shorter = ROUNDS * pipeline + microbatches % pipeline
    if microbatches <= shorter + pipeline:
        return _walked(kind, pipeline, virtual, microbatches, rank)
    first = _walked(kind, pipeline, virtual, shorter, rank)
    second = _walked(kind, pipeline, virtual, shorter + pipeline, rank)
    rounds = (microbatches - shorter) // pipeline
    later = []
    for one, more in zip(first.moments, second.moments, strict=True):
        grown = zip(one.held, more.held, strict=True)
        later.append(Moment(one.working, tuple(a + rounds * (b - a) for a, b in grown)))
    return Flight(first.stores, tuple(later))


@lru_cache(maxsize=16384)
def _walked(kind: str, pipeline: int, virtual: int, microbatches: int, rank: int) -> Flight:
    ops = order(kind, placement(kind, pipeline, virtual), microbatches, rank)
    rows = {letter: OP_KINDS[letter] for letter in {op.kind for op in ops}}
    kept = {(op.row.keeps, op.stage) for op in ops if op.row.keeps}
    freed = {(op.row.frees, op.stage) for op in ops if op.row.frees}
    stores = tuple(sorted(kept, key=lambda store: store[::-1]))
    places = {store: place for place, store in enumerate(stores)}
    now = [0] * len(stores)
    seen: dict[int, set[tuple[int, ...]]] = {}
    for letter, stage, _ in ops:
        row = rows[letter]
        if row.keeps:
            now[places[row.keeps, stage]] += 1
        seen.setdefault(stage if row.works else NOTHING, set()).add(tuple(now))
        if row.keeps and (row.keeps, stage) not in freed:  # as in a forward without gradients
            now[places[row.keeps, stage]] -= 1
        if row.frees:
            now[places[row.frees, stage]] -= 1
    return Flight(stores, tuple(_undominated(seen)))


def _undominated(seen: dict[int, set[tuple[int, ...]]]) -> Iterable[Moment]:
    """Moments that no other one with the same op, or with any if there is none, exceeds."""
    working = [stage for stage in sorted(seen) if stage != NOTHING]
    found = [Moment(stage, held) for stage in working for held in _largest(seen[stage])]
    yield from found
    for held in _largest(seen.get(NOTHING, set())):
        if not any(_exceeds(moment.held, held) for moment in found):
            yield Moment(NOTHING, held)


def _largest(states: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []
    for state in sorted(states, key=sum, reverse=True):
        if not any(_exceeds(other, state) for other in kept):
            kept.append(state)
    return sorted(kept)


def _exceeds(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(map(ge, one, other))  # asked millions of times in a search
