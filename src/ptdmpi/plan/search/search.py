"""The search for the fastest legal layouts. The search is exhaustive: it skips a layout only if a
lower bound of its step time shows that it cannot be among the fastest.

For each set of sizes (sizes of the axes, microbatch size, and chunks per rank), the search keeps
only the fastest settings with which the layout fits into memory. The settings are recomputation,
sequence parallelism, schedule, scattering of messages, sharding and offload.

Each layout has two lower bounds of its step time. The first bound (`Pricer.rough_bound_s`) is
computed from the mean work of a rank. The second bound (`Pricer.bound_s`) is the maximum of the
bounds of all ranks. The first bound is never greater than the second bound, and is cheaper to
compute. Computing the second bound is still cheaper than simulating the step. The search visits the
layouts in ascending order of the first bound (with their fastest sharding), and simulates the
visited layouts in ascending order of the second bound. The search ends when the bounds of all
layouts that are not simulated are at least the step time of the slowest kept layout. (The first
bound counts for layouts that are not yet visited, and the second bound for visited layouts.) At
that time, no other layout can be among the fastest, so the result is the same as if every layout
were simulated.

A second pass finds the simplest of the layouts that are almost as fast as the fastest layout.
Almost as fast means that the step time is less than 1 + `tie` times the shortest step time (`tie`
is an argument of `search`). The second pass simulates a layout only if its bound is below this
limit, and if the layout is simpler than the simplest such layout of the first pass.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ptdmpi.base.near import divisors
from ptdmpi.base.progress import SOON_S, progress
from ptdmpi.base.words import counted
from ptdmpi.config import InputError
from ptdmpi.config.layout import Dealing, Layout
from ptdmpi.config.zero import STAGES, covers_state
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.cost.relief import GROWTHS, size
from ptdmpi.plan.layer.legality import is_legal
from ptdmpi.plan.search.space import (
    Sharding,
    Space,
    chunked,
    contexts,
    groups,
    least_recomputed,
    sharding_words,
    shardings,
    uneven_firsts,
    variants,
)

HEADROOM = 8  # Percent of a device's memory that a plan keeps free.
# In a plan, layouts whose step times differ by less than this fraction are treated as equally fast,
# because predicted step times have larger errors.
TIE = 0.02
# largest number of layouts in a search; a search over this many layouts takes a minute and half a
# gigabyte of memory
MOST_LAYOUTS = 1_000_000


class Best:
    """The prices of the `count` fastest layouts so far, the fastest first.

    `same` is a function that returns a key for a layout. Only the fastest layout with each key is
    kept. A layout whose step takes `ceiling_s` seconds or longer is never kept.
    """

    def __init__(
        self, count: int, same: Callable[[Layout], Hashable], ceiling_s: float = math.inf
    ) -> None:
        self.count = count
        self.same = same
        self.ceiling_s = ceiling_s
        self.prices: list[Price] = []

    @property
    def limit_s(self) -> float:
        """Return the step time in seconds that a further layout must beat to be kept."""
        if len(self.prices) < self.count:
            return self.ceiling_s
        return self.prices[-1].step_time_s

    def offer(self, price: Price) -> None:
        """Keep `price` if its layout is among the `count` fastest layouts that were offered so
        far."""
        if price.step_time_s >= self.ceiling_s:
            return
        like = self.same(price.layout)
        for kept in self.prices:
            if self.same(kept.layout) == like:
                if kept.step_time_s <= price.step_time_s:
                    return
                self.prices.remove(kept)
                break
        bisect.insort(self.prices, price, key=lambda kept: kept.step_time_s)
        del self.prices[self.count :]

    def offer_all(self, pricer: Pricer, layouts: Iterable[Layout]) -> None:
        """Simulate the layouts in ascending order of their lower bounds, and keep the fastest. Stop
        when the bounds of all other layouts show that these cannot be among the fastest."""
        bounds = ((pricer.bound_s(layout), layout) for layout in layouts)
        for bound_s, layout in sorted(bounds, key=lambda pair: pair[0]):
            if bound_s >= self.limit_s:
                break
            self.offer(pricer.price(layout))


class _TimedSharding(NamedTuple):
    """A sharding (ZeRO stage, shard groups, offload), and a lower bound of the seconds that its
    messages take in a step."""

    data_s: float
    sharding: Sharding


class _Candidate(NamedTuple):
    """A layout without sharding, and the shardings with which it may fit into memory, the fastest
    first. `work_s` is a lower bound of the seconds of a step without the messages of the
    sharding."""

    layout: Layout
    shardings: list[_TimedSharding]
    work_s: float


@dataclass
class _Collected:
    """The layouts that a search has collected. `groups` has all legal layouts with one chunk per
    rank. `candidates` has the layouts with any number of chunks that may fit with at least one
    sharding. `rough` has pairs (rough bound in seconds, index of a candidate), where the bound is
    that of the candidate's fastest sharding."""

    groups: list[Layout] = field(default_factory=list)
    candidates: list[_Candidate] = field(default_factory=list)
    rough: list[tuple[float, int]] = field(default_factory=list)


def search(pricer: Pricer, space: Space, count: int = 5, *, tie: float = 0.0) -> list[Price]:
    """Return the prices of the `count` fastest layouts that fit into memory, the fastest first,
    each with its best settings.

    Layouts whose step takes less than 1 + `tie` times as long as the fastest step are treated as
    equally fast. The simplest of these layouts comes first, even if it is not among the `count`
    fastest layouts. Raises InputError if no layout is legal, or if no layout fits.
    """
    collected = _collect(pricer, space)
    best = Best(count, same=str)
    waiting: list[tuple[float, int, Layout]] = []  # heap of (lower bound in s, number, layout)
    numbers = itertools.count()
    with progress("searching", len(collected.candidates), "layout", SOON_S) as advance:
        for rough_s, number in [*sorted(collected.rough), (math.inf, -1)]:
            while waiting and waiting[0][0] <= rough_s and waiting[0][0] < best.limit_s:
                best.offer(pricer.price(heapq.heappop(waiting)[-1]))
                advance(0)
            if rough_s >= best.limit_s or number < 0:
                break
            advance(1)
            candidate = collected.candidates[number]
            for data_s, sharding in candidate.shardings:
                if candidate.work_s + data_s >= best.limit_s:
                    break  # all later shardings of this layout are slower
                sharded = sharding.of(candidate.layout)
                for layout in _all_fitting(pricer, space, sharded):
                    heapq.heappush(waiting, (pricer.bound_s(layout), next(numbers), layout))
    if not best.prices:
        raise InputError(_nothing_fits(pricer, space, collected))
    if not tie:
        return best.prices
    limit_s = best.prices[0].step_time_s * (1 + tie)
    fast = [price for price in best.prices if price.step_time_s < limit_s]
    least = min(_complexity(price.layout) for price in fast)
    simpler = _simpler(pricer, space, collected, limit_s, than=least)
    if simpler is not None:
        fast = [*fast[: count - 1], simpler]
    fast.sort(key=lambda price: (_complexity(price.layout), price.step_time_s))
    return [*fast, *(price for price in best.prices if price.step_time_s >= limit_s)]


def _complexity(layout: Layout) -> tuple[int, int]:
    """Return the complexity of a layout as a pair: (number of axes with several ranks, number of
    chunks per pipeline rank). A smaller pair means a simpler layout."""
    sizes = (layout.tensor, layout.context, layout.expert, layout.pipeline, layout.data)
    return sum(size > 1 for size in sizes), layout.virtual


def _simpler(
    pricer: Pricer,
    space: Space,
    collected: _Collected,
    limit_s: float,
    *,
    than: tuple[int, int],
) -> Price | None:
    """Return the price of the simplest layout of `collected` that fits and whose step takes less
    than `limit_s` seconds. If several layouts are equally simple, return the fastest of them.
    Return None if no such layout is simpler than `than` (see `_complexity`)."""
    classes: dict[tuple[int, int], list[_Candidate]] = {}
    for rough_s, number in collected.rough:
        candidate = collected.candidates[number]
        complexity = _complexity(candidate.layout)
        if rough_s < limit_s and complexity < than:
            classes.setdefault(complexity, []).append(candidate)
    for complexity in sorted(classes):
        best = Best(1, same=str, ceiling_s=limit_s)
        best.offer_all(
            pricer,
            (
                layout
                for candidate in classes[complexity]
                for data_s, sharding in candidate.shardings
                if candidate.work_s + data_s < limit_s
                for layout in _all_fitting(pricer, space, sharding.of(candidate.layout))
            ),
        )
        if best.prices:
            return best.prices[0]
    return None


def _all_fitting(pricer: Pricer, space: Space, layout: Layout) -> Iterator[Layout]:
    """Yield the variants of the layout that fit into memory. If `space.uneven` is True, also yield
    the fitting variants in which the first stage has fewer layers than the others."""
    for first in uneven_firsts(space, pricer, layout):
        yield from _fitting(pricer, space, first)


def _fitting(pricer: Pricer, space: Space, layout: Layout) -> Iterator[Layout]:
    """Yield the legal variants of a layout that fit into memory. If the first variant does not fit
    into memory, no other variant fits, because the first variant needs the least memory.

    If the first variant recomputes nothing and does not fit, yield the variant that recomputes just
    enough layers to fit. In a pipeline, this variant is yielded only if `space.uneven` is True (if
    the search may try uneven stages), because stages that recompute nothing would wait for the
    others.
    """
    for number, variant in enumerate(variants(space, layout)):
        if pricer.fits(variant):
            yield variant
        elif number == 0:
            may_recompute = variant.pipeline == 1 or space.uneven
            if variant.recompute == "none" and space.recompute is None and may_recompute:
                yield from least_recomputed(pricer, space, variant)
            return


def _collect(pricer: Pricer, space: Space) -> _Collected:
    """Return all legal layouts, with the first (rough) bounds of their step times. Raises
    InputError if there are more than `MOST_LAYOUTS` of them."""
    collected = _Collected()
    reported = 0
    known: dict[tuple[int, int, str, Dealing, int, str], list[tuple[float, float, Sharding]]] = {}
    with progress("collecting", None, "layout", SOON_S) as advance:
        for group in groups(space, pricer):
            axes = (group.tensor, group.context, group.exchange, group.dealing, group.pipeline)
            key = (*axes, group.recompute)
            if key not in known:
                known[key] = [
                    (*pricer.rough_data_s(sharding.of(group)), sharding)
                    for sharding in shardings(space, pricer, group)
                    if pricer.may_fit(sharding.of(group))
                ]
            collected.groups.append(group)
            m = group.microbatches(pricer.batch)
            timed = [
                _TimedSharding(after_s + m * each_s, sharding)
                for after_s, each_s, sharding in known[key]
            ]
            if not timed:
                continue
            timed.sort(key=lambda entry: entry.data_s)
            for layout in chunked(space, group, pricer.model.config.layers, pricer.batch):
                least = layout
                if space.uneven and layout.pipeline > 1 and layout.first_layers is None:
                    least = layout.changed(first_layers=1)
                work_s = pricer.rough_work_s(least)
                collected.rough.append((work_s + timed[0].data_s, len(collected.candidates)))
                collected.candidates.append(_Candidate(layout, timed, work_s))
            advance(len(collected.candidates) - reported)
            reported = len(collected.candidates)
            if reported > MOST_LAYOUTS:
                raise InputError(
                    f"more than {MOST_LAYOUTS:,} layouts of {pricer.model.name} are legal on "
                    f"{counted(space.ranks, 'rank')} at a batch of {pricer.batch}: choose numbers "
                    "with fewer divisors, or give --recompute or a --layout"
                )
    return collected


def _nothing_fits(pricer: Pricer, space: Space, collected: _Collected) -> str:
    """Return the error message for the case that no layout fits. If layouts are legal, the message
    says how much memory the smallest layout needs, and which other settings or numbers of ranks
    would fit. Otherwise the message says which numbers of ranks have a legal layout."""
    where = f"{counted(space.ranks, 'rank')} of {pricer.cluster.name}"
    legal = _all_ways(pricer, space, collected.groups)
    if not legal:
        near = " or ".join(map(str, _legal_ranks(pricer, space)))
        config = pricer.model.config
        if space.data is not None:
            sizes = " or ".join(map(str, space.data))
            return (
                f"no layout of {pricer.model.name} with d = {sizes} is legal on {where}, and the "
                "run's edge list or its split of datasets allows no other d; legal: another number "
                "of ranks"
            )
        return (
            f"no layout of {pricer.model.name} is legal on {where}: t must divide the "
            f"{counted(config.heads, 'head')}, p be at most {config.layers}, d b divide "
            f"the batch of {pricer.batch}; legal nearby: {near} ranks"
        )
    least = min(legal, key=lambda layout: pricer.footprint(layout).total)
    needed = pricer.footprint(least)
    parts = ", ".join(f"{name} {size(n)}" for name, n in needed.parts.items() if n)
    helps = []
    memory = size(pricer.capacity_bytes)
    if pricer.usable_bytes < pricer.capacity_bytes:
        memory += f", {1 - pricer.usable_bytes / pricer.capacity_bytes:.0%} of which stay free"
        if any(map(pricer.keeping_free(0).fits, legal)):
            helps.append("--headroom 0")
    helps += itertools.islice(_more_ranks(pricer, space), 1)
    freer = replace(space, zero=STAGES, shard_group=None, offload=None)
    all_ways = _all_ways(pricer, freer, collected.groups)
    fitting = (layout for layout in all_ways if pricer.fits(layout))
    helps += [sharding_words(layout) for layout in itertools.islice(fitting, 1)]
    advice = "nor would one on 64 times as many ranks"
    if helps:
        advice = "would fit: " + ", or ".join(helps)
    return (
        f"no layout of {pricer.model.name} fits on {where}: the smallest one needs "
        f"{size(needed.total)} per rank ({', '.join(_named(least))}: {parts}), "
        f"and a rank has {memory}; {advice}"
    )


def _named(layout: Layout) -> list[str]:
    """Return a description of a layout: the sizes of its axes, its recomputation, and, if state is
    sharded or offloaded, its sharding."""
    words = [str(layout), f"recompute {layout.recompute}"]
    if covers_state(layout.zero) or layout.offload != "none":
        words.append(sharding_words(layout))
    return words


def _all_ways(pricer: Pricer, space: Space, layouts: Iterable[Layout]) -> list[Layout]:
    """Return the layouts, each with every sharding that is legal for it. Layouts without offload
    come first, then layouts with offload. Each of these two groups is in ascending order of the
    ZeRO stage."""
    sharded = (
        sharding.of(layout) for layout in layouts for sharding in shardings(space, pricer, layout)
    )
    legal = [layout for layout in sharded if is_legal(layout, pricer.model.config, pricer.batch)]
    return sorted(legal, key=lambda layout: (layout.offload != "none", layout.zero))


def _more_ranks(pricer: Pricer, space: Space) -> Iterator[str]:
    """Yield a text for each layout that has more ranks than `space.ranks` and fits into memory. The
    texts are in ascending order of the number of ranks."""
    for factor in GROWTHS[1:]:
        bigger = replace(space, ranks=factor * space.ranks)
        for layout in _all_ways(pricer, bigger, groups(bigger, pricer)):
            if pricer.fits(layout):
                needed = size(pricer.footprint(layout).total)
                yield f"{layout.ranks} ranks ({needed} with {', '.join(_named(layout))})"


def _legal_ranks(pricer: Pricer, space: Space) -> list[int]:
    """Return the numbers of ranks nearest to `space.ranks` that have a legal layout: the nearest
    smaller number and the nearest greater number, if they exist."""
    config = pricer.model.config
    tensors = [t for t in divisors(config.heads) if is_legal(Layout(t, 1, 1), config, 1)]
    model_rows = {t * c for t in tensors for c in contexts(space, config)}
    below: list[int] = []
    above: list[int] = []
    for rows in {row * d for row in model_rows for d in divisors(pricer.batch)}:
        # take the legal pipeline-parallel sizes for which the total number of ranks is nearest to
        # `space.ranks`, below and above
        fewer = (space.ranks - 1) // rows
        more = space.ranks // rows + 1
        if fewer:
            below.append(rows * min(fewer, config.layers))
        if more <= config.layers:
            above.append(rows * more)
    return sorted(below)[-1:] + sorted(above)[:1]
