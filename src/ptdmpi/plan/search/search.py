"""Every legal layout, and the best of them: exhaustive, with bounds that cannot lose the best.

Of the settings of a layout of the same sizes (recomputation, sequence parallelism, schedule, how
messages travel, what is sharded and offloaded) the fastest that fit count.

Three bounds of a layout's step time, each cheaper and no larger than the next: of the mean rank
(`Pricer.rough_bound_s`), of every rank (`Pricer.bound_s`), the simulation itself. Layouts are
looked at by ascending first bound, that with the quickest sharding, simulated by ascending second
one, and the search ends where neither the next first bound nor the next second one is below the
slowest layout that is kept: no layout behind can be among the best. So the result is that of
simulating all of them, and learned or approximate searches have nothing to add.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from ptdmpi.base.near import divisors
from ptdmpi.base.words import counted
from ptdmpi.config import InputError
from ptdmpi.config.layout import Layout
from ptdmpi.config.legality import is_legal
from ptdmpi.config.zero import STAGES, covers_state
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.cost.relief import GROWTHS, size
from ptdmpi.plan.search.space import (
    Sharding,
    Space,
    chunked,
    groups,
    least_recomputed,
    sharding_words,
    shardings,
    uneven_firsts,
    variants,
)
from ptdmpi.terminal.progress import SOON_S, progress

MOST_LAYOUTS = 1_000_000  # that are looked at: a minute, and half a gigabyte of them


class Best:
    """The `count` fastest prices seen, fastest first; of layouts that agree in `same` the
    fastest."""

    def __init__(self, count: int, same: Callable[[Layout], Hashable]) -> None:
        self.count, self.same = count, same
        self.prices: list[Price] = []

    @property
    def limit_s(self) -> float:
        """What a layout must be faster than to be kept."""
        return self.prices[-1].step_time_s if len(self.prices) == self.count else math.inf

    def offer(self, price: Price) -> None:
        like = self.same(price.layout)
        for kept in self.prices:
            if self.same(kept.layout) == like:
                if kept.step_time_s <= price.step_time_s:
                    return
                self.prices.remove(kept)
                break
        bisect.insort(self.prices, price, key=lambda kept: kept.step_time_s)
        del self.prices[self.count :]


@dataclass
class _Collected:
    """Every legal layout at v = 1; and of those with a sharding that may fit the rough bounds: of
    the work, `work_s`, and with the quickest of the `ways` to be sharded, which are in order."""

    groups: list[Layout] = field(default_factory=list)
    ways: list[list[tuple[float, Sharding]]] = field(default_factory=list)
    layouts: list[tuple[Layout, int, float]] = field(default_factory=list)  # (it, ways, work_s)
    rough: list[tuple[float, int]] = field(default_factory=list)  # (bound, number of the layout)


def search(pricer: Pricer, space: Space, count: int = 5) -> list[Price]:
    """The `count` fastest layouts that fit, fastest first, each at its best settings. Raises
    InputError if none fits or is legal."""
    collected = _collect(pricer, space)
    found = Best(count, same=str)
    waiting: list[tuple[float, int, Layout]] = []  # heap of (bound, number, layout)
    numbers = itertools.count()
    with progress("searching", len(collected.layouts), "layout", SOON_S) as advance:
        for rough_s, number in [*sorted(collected.rough), (math.inf, -1)]:
            while waiting and waiting[0][0] <= rough_s and waiting[0][0] < found.limit_s:
                found.offer(pricer.price(heapq.heappop(waiting)[-1]))
                advance(0)
            if rough_s >= found.limit_s or number < 0:
                break
            advance(1)
            layout, ways, work_s = collected.layouts[number]
            for data_s, sharding in collected.ways[ways]:
                if work_s + data_s >= found.limit_s:
                    break  # nor is one of the slower ways behind it any quicker
                for one in _all_fitting(pricer, space, sharding.of(layout)):
                    heapq.heappush(waiting, (pricer.bound_s(one), next(numbers), one))
    if not found.prices:
        raise InputError(_nothing_fits(pricer, space, collected))
    return found.prices


def _all_fitting(pricer: Pricer, space: Space, layout: Layout) -> Iterator[Layout]:
    """Those that fit of the layout and, where that is asked for, of its uneven ones."""
    for first in uneven_firsts(space, pricer, layout):
        yield from _fitting(pricer, space, first)


def _fitting(pricer: Pricer, space: Space, layout: Layout) -> Iterator[Layout]:
    """The legal variants that fit; where the first does not, no other one does. Of those on one
    stage that recompute nothing and do not fit, with as few layers recomputed as fit: on several
    stages, those that recompute would keep the others waiting, so that is left to `space.uneven`.
    """
    for way, one in enumerate(variants(space, layout)):
        if pricer.fits(one):
            yield one
        elif way == 0:
            some = one.pipeline == 1 or space.uneven
            if one.recompute == "none" and space.recompute is None and some:
                yield from least_recomputed(pricer, space, one)
            return


def _collect(pricer: Pricer, space: Space) -> _Collected:
    """All layouts. Raises InputError for more than `MOST_LAYOUTS`."""
    found, told = _Collected(), 0
    known: dict[tuple[int, int, int, str], list[tuple[float, float, Sharding]]] = {}
    with progress("collecting", None, "layout", SOON_S) as advance:
        for group in groups(space, pricer):
            key = (group.tensor, group.pipeline, group.data, group.recompute)
            if key not in known:
                known[key] = [
                    (*pricer.rough_data_s(one.of(group)), one)
                    for one in shardings(space, pricer, group)
                    if pricer.may_fit(one.of(group))
                ]
            found.groups.append(group)
            m = group.microbatches(pricer.batch)
            ways = [(after_s + m * each_s, one) for after_s, each_s, one in known[key]]
            if not ways:
                continue
            ways.sort(key=lambda way: way[0])
            for layout in chunked(space, group, pricer.model.config.layers, pricer.batch):
                uneven = space.uneven and layout.pipeline > 1 and layout.first_layers is None
                least = layout.changed(first_layers=1) if uneven else layout
                work_s = pricer.rough_work_s(least)
                found.rough.append((work_s + ways[0][0], len(found.layouts)))
                found.layouts.append((layout, len(found.ways), work_s))
            found.ways.append(ways)
            advance(len(found.layouts) - told)
            told = len(found.layouts)
            if told > MOST_LAYOUTS:
                raise InputError(
                    f"more than {MOST_LAYOUTS:,} layouts of {pricer.model.name} are legal on "
                    f"{counted(space.ranks, 'rank')} at a batch of {pricer.batch}: choose numbers "
                    "with fewer divisors, or give --recompute or a --layout"
                )
    return found


def _nothing_fits(pricer: Pricer, space: Space, collected: _Collected) -> str:
    """What is missing, and what would be legal or fit."""
    where = f"{counted(space.ranks, 'rank')} of {pricer.cluster.name}"
    legal = _all_ways(pricer, space, collected.groups)
    if not legal:
        near = " or ".join(map(str, _legal_ranks(pricer, space)))
        config = pricer.model.config
        if space.data is not None:
            sizes = " or ".join(map(str, space.data))
            return (
                f"no layout of {pricer.model.name} with d = {sizes}, which is what the run's edge "
                f"list or dealt datasets fit, is legal on {where}; legal: other ranks"
            )
        return (
            f"no layout of {pricer.model.name} is legal on {where}: t must divide the "
            f"{counted(config.heads, 'head')}, p be at most {config.layers}, d b divide "
            f"the batch of {pricer.batch}; legal nearby: {near} ranks"
        )
    least = min(legal, key=lambda layout: pricer.footprint(layout).total)
    needed = pricer.footprint(least)
    parts = ", ".join(f"{name} {size(n)}" for name, n in needed.parts.items() if n)
    helps = [*itertools.islice(_more_ranks(pricer, space), 1)]
    freer = replace(space, zero=STAGES, shard_group=None, offload=None)
    more = (one for one in _all_ways(pricer, freer, collected.groups) if pricer.fits(one))
    helps += [sharding_words(one) for one in itertools.islice(more, 1)]
    advice = "would fit: " + ", or ".join(helps) if helps else "nor would one on 64 times as many"
    return (
        f"no layout of {pricer.model.name} fits on {where}: the least that one needs is "
        f"{size(needed.total)} per rank ({', '.join(_named(least))}: {parts}) of "
        f"{size(pricer.capacity_bytes)}; {advice}"
    )


def _named(layout: Layout) -> list[str]:
    words = [str(layout), f"recompute {layout.recompute}"]
    if covers_state(layout.zero) or layout.offload != "none":
        words.append(sharding_words(layout))
    return words


def _all_ways(pricer: Pricer, space: Space, layouts: Iterable[Layout]) -> list[Layout]:
    """The layouts in every way to be sharded, those that send least first."""
    config, batch = pricer.model.config, pricer.batch
    ways = (one.of(layout) for layout in layouts for one in shardings(space, pricer, layout))
    legal = [layout for layout in ways if is_legal(layout, config, batch)]
    return sorted(legal, key=lambda layout: (layout.offload != "none", layout.zero))


def _more_ranks(pricer: Pricer, space: Space) -> Iterator[str]:
    """A layout that fits on as few times the ranks as possible."""
    for factor in GROWTHS[1:]:
        bigger = replace(space, ranks=factor * space.ranks)
        for layout in _all_ways(pricer, bigger, groups(bigger, pricer)):
            if pricer.fits(layout):
                needed = size(pricer.footprint(layout).total)
                yield f"{layout.ranks} ranks ({needed} with {', '.join(_named(layout))})"


def _legal_ranks(pricer: Pricer, space: Space) -> list[int]:
    """The numbers of ranks next to the one asked for that have a legal layout."""
    config, batch = pricer.model.config, pricer.batch
    tensors = [t for t in divisors(config.heads) if is_legal(Layout(t, 1, 1), config, 1)]
    below, above = [], []
    for rows in {t * d for t in tensors for d in divisors(batch)}:
        # of the p that are legal the one next to the ranks asked for, on either side
        fewer, more = (space.ranks - 1) // rows, space.ranks // rows + 1
        below += [rows * min(fewer, config.layers)] if fewer else []
        above += [rows * more] if more <= config.layers else []
    return [*([max(below)] if below else []), *([min(above)] if above else [])]
