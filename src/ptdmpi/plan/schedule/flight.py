"""The numbers of microbatches that a pipeline rank holds in memory at the same time. These numbers
depend only on the order of ops (the forward and backward computations on microbatches), and not on
the sizes of the model.

The function `held.held` visits all ops of an order to find the highest memory of one model and
layout. A search needs the highest memory of thousands of layouts, but these layouts have only a few
different orders. Therefore the functions of this file visit each order only once. For each order,
they find the few moments at which the memory of any model can be the highest.
"""

from collections.abc import Iterable
from functools import lru_cache
from operator import ge, itemgetter
from typing import NamedTuple

from ptdmpi.plan.schedule.ops import OP_KINDS
from ptdmpi.plan.schedule.orders import Placement, placement
from ptdmpi.plan.schedule.orders import order as ops_of_rank

# A round is p microbatches, where p is the number of pipeline ranks. After ROUNDS rounds, a
# schedule is in steady state. If the schedule keeps all microbatches (as GPipe does), each further
# round adds p microbatches to each store (see `Moment`). Otherwise each further round has the same
# numbers of microbatches in memory as the round before.
ROUNDS = 3
NOTHING = ("", -1)
KIND_AND_STAGE = itemgetter(0, 1)  # returns (kind, stage) of an op


class RankOrder(NamedTuple):
    """The properties that determine the order of ops of the pipeline rank `rank`: the schedule
    `kind`, and the numbers of pipeline ranks (`pipeline`), chunks per rank (`virtual`) and
    microbatches."""

    kind: str
    pipeline: int
    virtual: int
    microbatches: int
    rank: int

    @property
    def placed(self) -> Placement:
        """Return the placement of the schedule's stages."""
        return placement(self.kind, self.pipeline, self.virtual)


class Moment(NamedTuple):
    """A moment in an order of ops, with the number of microbatches that the rank holds in each
    store at this moment. A store is the memory for one inventory (a set of tensors, see `OpKind`)
    of one stage.

    `working` is the name and the stage of the working memory of the running op, or `NOTHING` if the
    op needs no working memory. `held` has the number of microbatches for each store of the
    `Flight`. The numbers include the microbatch of the running op. There is one exception: if this
    op frees one inventory and keeps another, both are counted in its working memory instead.
    """

    working: tuple[str, int]
    held: tuple[int, ...]


class Flight(NamedTuple):
    """The stores of a rank, and the moments at which the rank may hold the most memory. A store is
    the memory for one set of tensors (inventory) of one stage.

    `stores` has a pair (inventory, stage) for each store of the rank, in order of stages. Moments
    that cannot have the most memory are left out. A moment with working memory is left out if
    another moment with the same working memory holds at least as much in every store. A moment
    without working memory is left out if any other moment holds at least as much in every store.
    """

    stores: tuple[tuple[str, int], ...]
    moments: tuple[Moment, ...]


@lru_cache(maxsize=16384)
def fullest(order: RankOrder) -> Flight:
    """Return the moments of a step at which a pipeline rank may hold the most memory, if the rank
    runs its ops in the order `order`."""
    pipeline, microbatches = order.pipeline, order.microbatches
    # If there are many microbatches, the order for a smaller number of microbatches (`shorter`) is
    # visited instead. Interleaving pads the last round, so the moments depend on the number of
    # microbatches in this round. Therefore `shorter` has the same remainder modulo `pipeline` as
    # `microbatches`.
    shorter = ROUNDS * pipeline + microbatches % pipeline
    if microbatches <= shorter + pipeline:
        return _walked(order)
    first = _walked(order._replace(microbatches=shorter))
    if all(max(moment.held) < shorter for moment in first.moments):
        return first  # no store holds all microbatches, so the schedule is in steady state
    second = _walked(order._replace(microbatches=shorter + pipeline))
    # The schedule keeps all microbatches, so every further round adds the same numbers to the
    # stores.
    rounds = (microbatches - shorter) // pipeline
    later = []
    for fewer, more in zip(first.moments, second.moments, strict=True):
        grown = zip(fewer.held, more.held, strict=True)
        later.append(Moment(fewer.working, tuple(a + rounds * (b - a) for a, b in grown)))
    return Flight(first.stores, tuple(later))


@lru_cache(maxsize=16384)
def fullest_alike(order: RankOrder, alike: tuple[int, ...]) -> Flight:
    """Return the result of `fullest`, but merge the stores of stages that need the same memory.
    Such stages form a group, and `alike[i]` is the number of the group of the rank's i-th stage. In
    the result, the number of a group replaces the number of a stage.
    """
    flight = fullest(order)
    own = order.placed.stages_of(order.rank)
    like = {NOTHING[1]: NOTHING[1], **dict(zip(own, alike, strict=True))}
    grouped = [(inventory, like[stage]) for inventory, stage in flight.stores]
    stores = tuple(dict.fromkeys(grouped))
    places = [stores.index(store) for store in grouped]
    seen: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    moments = []
    for (works, stage), held in flight.moments:
        now = [0] * len(stores)
        for place, count in zip(places, held, strict=True):
            now[place] += count
        moments.append(Moment((works, like[stage]), tuple(now)))
        seen.setdefault(moments[-1].working, set()).add(moments[-1].held)
    largest = {working: set(_largest(states)) for working, states in seen.items()}
    kept = (moment for moment in moments if moment.held in largest[moment.working])
    return Flight(stores, tuple(dict.fromkeys(kept)))


@lru_cache(maxsize=16384)
def _walked(order: RankOrder) -> Flight:
    ops = ops_of_rank(order.kind, order.placed, order.microbatches, order.rank)
    rows = {(letter, stage): OP_KINDS[letter] for letter, stage in set(map(KIND_AND_STAGE, ops))}
    kept = {(row.keeps, stage) for (_, stage), row in rows.items() if row.keeps}
    freed = {(row.frees, stage) for (_, stage), row in rows.items() if row.frees}
    stores = tuple(sorted(kept, key=lambda store: store[::-1]))
    places = {store: place for place, store in enumerate(stores)}
    steps = {
        (letter, stage): (
            (row.works, stage) if row.works else NOTHING,
            places.get((row.keeps, stage)),
            places.get((row.frees, stage)),
            # True if the op keeps an inventory that no op frees
            bool(row.keeps) and (row.keeps, stage) not in freed,
        )
        for (letter, stage), row in rows.items()
    }
    now, grown = [0] * len(stores), 0
    seen: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    # `grown` counts how often a store has grown. Working memory -> `grown` at the last moment that
    # was recorded with this working memory
    recorded: dict[tuple[str, int], int] = {}
    for working, keeps, frees, passing in map(steps.__getitem__, map(KIND_AND_STAGE, ops)):
        # True if the op frees one inventory and keeps another
        trades = keeps is not None and frees is not None
        if keeps is not None and not trades:
            now[keeps] += 1
            grown += 1
        # A moment is recorded only if a store has grown since the last moment that was recorded
        # with the same working memory. For an op with working memory, the moment is during the op.
        # A moment without working memory is recorded before a store shrinks.
        if working != NOTHING and recorded.get(working) != grown and not trades:
            recorded[working] = recorded[NOTHING] = grown
            seen.setdefault(working, set()).add(tuple(now))
        going = passing or frees is not None
        if going and recorded.get(NOTHING) != grown:
            recorded[NOTHING] = grown
            seen.setdefault(NOTHING, set()).add(tuple(now))
        if passing and keeps is not None:
            now[keeps] -= 1
        if frees is not None:
            now[frees] -= 1
        if keeps is not None and trades:
            seen.setdefault(working, set()).add(tuple(now))
            now[keeps] += 1
            grown += 1
    if recorded.get(NOTHING) != grown:
        seen.setdefault(NOTHING, set()).add(tuple(now))
    return Flight(stores, tuple(_undominated(seen)))


def _undominated(seen: dict[tuple[str, int], set[tuple[int, ...]]]) -> Iterable[Moment]:
    """Yield the moments that no other moment dominates. One moment dominates another if every store
    has at least as many microbatches at the first moment as at the second.

    A moment with working memory is compared only with moments that have the same working memory. A
    moment without working memory is compared with all moments.
    """
    working = [Moment(w, held) for w in sorted(seen) if w != NOTHING for held in _largest(seen[w])]
    yield from working
    for held in _largest(seen.get(NOTHING, set())):
        if not any(_exceeds(moment.held, held) for moment in working):
            yield Moment(NOTHING, held)


def _largest(states: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []
    for state in sorted(states, key=sum, reverse=True):
        if not any(_exceeds(other, state) for other in kept):
            kept.append(state)
    return sorted(kept)


def _exceeds(held: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(map(ge, held, other))  # a search calls this function millions of times
