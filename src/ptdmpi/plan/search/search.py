"""Every legal layout, and the best of them: exhaustive, with bounds that cannot lose the best.

Of the settings of a layout of the same sizes (recomputation, sequence parallelism, schedule, how
messages travel) the fastest that fit count.

Three bounds of a layout's step time, each cheaper and no larger than the next: of the mean rank
(`Pricer.rough_bound_s`), of every rank (`Pricer.bound_s`), the simulation itself. Layouts are
looked at by ascending first bound, simulated by ascending second one, and the search ends where
neither the next first bound nor the next second one is below the slowest layout that is kept: no
layout behind can be among the best. So the result is that of simulating all of them, and learned or
approximate searches have nothing to add.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ptdmpi.base.words import counted
from ptdmpi.config import InputError
from ptdmpi.config.layout import (
    LETTERS,
    MOST_FORWARDS,
    RECOMPUTE_MODES,
    Layout,
    chunk_rule,
    default_schedule,
)
from ptdmpi.config.near import divisors
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.cost.relief import GROWTHS, size
from ptdmpi.terminal.progress import SOON_S, progress

# Chunks per rank, and stages, that are looked at: what further ones would save of the bubble is
# little, and each costs messages.
MOST_CHUNKS, MOST_STAGES = 64, 256
MOST_LAYOUTS = 1_000_000  # that are looked at: a minute, and half a gigabyte of them
SWITCHES = ("sequence_parallel", "scatter_gather", "dp_overlap")  # of a Layout
CHINCHILLA_TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022 (arXiv 2203.15556), Table 3


@dataclass(frozen=True)
class Space:
    """What the search may choose from; None leaves a setting to it."""

    ranks: int
    schedule: str | None = None
    recompute: str | None = None
    sequence_parallel: bool | None = None
    scatter_gather: bool | None = None
    zero: int = 0
    dp_overlap: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Those of a Layout, as `groups` takes them; `variants` takes them the other way."""
        return {
            "scatter_gather": self.scatter_gather is not False,
            "zero": self.zero,
            "dp_overlap": self.dp_overlap,
        }


def groups(space: Space, pricer: Pricer) -> Iterator[Layout]:
    """Every legal layout at v = 1, which stands for all v."""
    config, batch = pricer.model.config, pricer.batch
    modes = RECOMPUTE_MODES if space.recompute is None else (space.recompute,)
    for tensor in divisors(math.gcd(space.ranks, config.heads)):
        parallel: tuple[bool, ...] = (False, True) if tensor > 1 else (False,)
        if space.sequence_parallel is not None:
            parallel = (space.sequence_parallel and tensor > 1,)
        for pipeline in divisors(space.ranks // tensor):
            data = space.ranks // tensor // pipeline
            # asked before layouts are made: most of the space of a large batch ends here
            if pipeline > config.layers or batch % data:
                continue
            for micro_size in divisors(batch // data):
                base = Layout(tensor, pipeline, data, 1, micro_size, **space.settings)
                for sequence_parallel in parallel:
                    for mode in modes:
                        layout = replace(base, sequence_parallel=sequence_parallel, recompute=mode)
                        if layout.is_legal(config, batch):
                            yield layout


def chunked(space: Space, group: Layout, layers: int, batch: int) -> Iterator[Layout]:
    """The layouts of a group: every v that is looked at, under the schedule asked for or its
    default. One stage alone has nothing to interleave."""
    most = 1
    if group.pipeline > 1:
        p, microbatches = group.pipeline, group.microbatches(batch)
        ordered = MOST_FORWARDS // (p * microbatches)  # what the rule of legality allows
        most = max(1, min(layers // p, MOST_CHUNKS, MOST_STAGES // p, ordered))
    for virtual in range(1, most + 1):
        kind = space.schedule or default_schedule(virtual)
        if chunk_rule(kind, virtual).broken:
            continue
        yield replace(group, virtual=virtual, schedule=kind)


def variants(space: Space, layout: Layout) -> Iterator[Layout]:
    """The layout and what else its sizes allow: GPipe, whole messages. None needs less memory:
    GPipe keeps all microbatches, and a tensor is whole at its stage either way."""
    kinds, scatters = [layout.schedule], [layout.scatter_gather]
    if layout.pipeline > 1 and space.schedule is None:
        kinds.append("gpipe")
    whole = layout.tensor > 1 and layout.pipeline > 1 and not layout.sequence_parallel
    if whole and space.scatter_gather is None:
        scatters.append(False)
    for kind, scatter in itertools.product(kinds, scatters):
        yield replace(layout, schedule=kind, scatter_gather=scatter)


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


def search(pricer: Pricer, space: Space, count: int = 5) -> list[Price]:
    """The `count` fastest layouts that fit, fastest first, each at its best settings. Raises
    InputError if none fits or is legal."""
    legal, layouts, rough = _collected(pricer, space)
    found = Best(count, same=str)
    waiting: list[tuple[float, int, int, Layout]] = []  # heap of (bound, number, way, layout)
    with progress("searching", len(layouts), "layout", SOON_S) as advance:
        for rough_s, number in [*rough, (math.inf, -1)]:
            while waiting and waiting[0][0] <= rough_s and waiting[0][0] < found.limit_s:
                found.offer(pricer.price(heapq.heappop(waiting)[-1]))
                advance(0)
            if rough_s >= found.limit_s or number < 0:
                break
            advance(1)
            if not pricer.fits(layouts[number]):
                continue
            # the first way fits, as was just asked; no other one needs less
            for way, layout in enumerate(variants(space, layouts[number])):
                if way == 0 or pricer.fits(layout):
                    heapq.heappush(waiting, (pricer.bound_s(layout), number, way, layout))
    if not found.prices:
        raise InputError(_nothing_fits(pricer, space, legal))
    return found.prices


def _collected(
    pricer: Pricer, space: Space
) -> tuple[list[Layout], list[Layout], list[tuple[float, int]]]:
    """(groups, layouts, the rough bound and number of each layout, ascending). Raises InputError
    for more than `MOST_LAYOUTS`."""
    legal: list[Layout] = []
    layouts: list[Layout] = []
    rough: list[tuple[float, int]] = []
    told = 0
    with progress("collecting", None, "layout", SOON_S) as advance:
        for group in groups(space, pricer):
            legal.append(group)
            for layout in chunked(space, group, pricer.model.config.layers, pricer.batch):
                rough.append((pricer.rough_bound_s(layout), len(layouts)))
                layouts.append(layout)
            advance(len(layouts) - told)
            told = len(layouts)
            if len(layouts) > MOST_LAYOUTS:
                raise InputError(
                    f"more than {MOST_LAYOUTS:,} layouts of {pricer.model.name} are legal on "
                    f"{counted(space.ranks, 'rank')} at a batch of {pricer.batch}: choose numbers "
                    "with fewer divisors, or give --recompute or a --layout"
                )
    return legal, layouts, sorted(rough)


def _nothing_fits(pricer: Pricer, space: Space, legal: list[Layout]) -> str:
    """What is missing, and what would be legal or fit."""
    where = f"{counted(space.ranks, 'rank')} of {pricer.cluster.name}"
    if not legal:
        near = " or ".join(map(str, _legal_ranks(pricer, space)))
        config = pricer.model.config
        return (
            f"no layout of {pricer.model.name} is legal on {where}: t must divide the "
            f"{counted(config.heads, 'head')}, p be at most {config.layers}, d b divide "
            f"the batch of {pricer.batch}; legal nearby: {near} ranks"
        )
    least = min(legal, key=lambda layout: pricer.footprint(layout).total)
    needed = pricer.footprint(least)
    parts = ", ".join(f"{name} {size(n)}" for name, n in asdict(needed).items() if n)
    grown = (replace(space, ranks=factor * space.ranks) for factor in GROWTHS[1:])
    more = (
        f"{layout.ranks} ranks ({size(pricer.footprint(layout).total)} with {layout})"
        for layout in itertools.chain.from_iterable(groups(bigger, pricer) for bigger in grown)
        if pricer.fits(layout)
    )
    sharded = (
        f"--zero {zero} (ptdmpi train has no ZeRO)"
        for zero in range(space.zero + 1, 4)
        if any(pricer.fits(replace(layout, zero=zero)) for layout in legal)
    )
    helps = [*itertools.islice(more, 1), *itertools.islice(sharded, 1)]
    advice = "would fit: " + ", or ".join(helps) if helps else "nor would one on 64 times as many"
    return (
        f"no layout of {pricer.model.name} fits on {where}: the least that one needs is "
        f"{size(needed.total)} per rank ({least}, recompute {least.recompute}: {parts}) of "
        f"{size(pricer.capacity_bytes)}; {advice}"
    )


def _legal_ranks(pricer: Pricer, space: Space) -> list[int]:
    """The numbers of ranks next to the one asked for that have a legal layout."""
    config, batch = pricer.model.config, pricer.batch
    tensors = [t for t in divisors(config.heads) if Layout(t, 1, 1).is_legal(config, 1)]
    below, above = [], []
    for rows in {t * d for t in tensors for d in divisors(batch)}:
        # of the p that are legal the one next to the ranks asked for, on either side
        fewer, more = (space.ranks - 1) // rows, space.ranks // rows + 1
        below += [rows * min(fewer, config.layers)] if fewer else []
        above += [rows * more] if more <= config.layers else []
    return [*([max(below)] if below else []), *([min(above)] if above else [])]


def neighbours(layout: Layout, pricer: Pricer) -> Iterator[Layout]:
    """Every legal layout that differs in one decision: a setting, or ranks moved from one axis to
    another."""
    sizes = ("tensor", "pipeline", "data")
    tried: list[Layout] = []
    for source, target in itertools.permutations(sizes, 2):
        ranks = getattr(layout, source)
        if ranks % 2 == 0:
            moved = {source: ranks // 2, target: getattr(layout, target) * 2}
            tried.append(replace(layout, **moved))
    for micro_size in {layout.micro_size // 2, layout.micro_size * 2} - {0}:
        tried.append(replace(layout, micro_size=micro_size))
    for virtual in {1, layout.virtual - 1, layout.virtual + 1, 2 * layout.virtual} - {0}:
        tried.append(replace(layout, virtual=virtual, schedule=default_schedule(virtual)))
    other = default_schedule(layout.virtual) if layout.schedule == "gpipe" else "gpipe"
    tried.append(replace(layout, schedule=other))
    tried += [replace(layout, recompute=mode) for mode in RECOMPUTE_MODES]
    for key in SWITCHES:
        switched: dict[str, Any] = {key: not getattr(layout, key)}
        tried.append(replace(layout, **switched))
    tried += [replace(layout, zero=zero) for zero in range(4)]
    for changed in tried:
        if changed != layout and changed.is_legal(pricer.model.config, pricer.batch):
            yield changed


def difference(layout: Layout, changed: Layout) -> str:
    """What is other in `changed`, as options of the command line would say it."""
    words = [
        f"{letter}={getattr(changed, name)}"
        for letter, name in LETTERS.items()
        if getattr(changed, name) != getattr(layout, name)
    ]
    kinds = {layout.schedule, changed.schedule}
    if len(kinds) == 2 and "gpipe" in kinds:  # the others follow from v
        words.append(f"--schedule {changed.schedule}")
    if changed.recompute != layout.recompute:
        words.append(f"recompute {changed.recompute}")
    for key in SWITCHES:
        if (on := getattr(changed, key)) != getattr(layout, key):
            words.append(f"--{'' if on else 'no-'}{key.replace('_', '-')}")
    if changed.zero != layout.zero:
        words.append(f"--zero {changed.zero}")
    return ", ".join(words)


def improvements(price: Price, pricer: Pricer, count: int = 3) -> tuple[int, list[Price]]:
    """(how many changes each is away, the layouts that help most): to fit, by the least slowdown,
    else to be faster. Two changes where no single one makes the layout fit; where no two do, the
    single ones that save most memory."""
    single = list(neighbours(price.layout, pricer))
    found = [pricer.price(layout) for layout in single]
    if price.fits:
        found = [other for other in found if other.fits and other.step_time_s < price.step_time_s]
        return 1, sorted(found, key=lambda other: other.step_time_s)[:count]
    if fitting := [other for other in found if other.fits]:
        return 1, sorted(fitting, key=lambda other: other.step_time_s)[:count]
    double = {two for one in single for two in neighbours(one, pricer)} - {price.layout}
    best = _fastest(pricer, [layout for layout in double if pricer.fits(layout)], count)
    if best:
        return 2, best
    return 1, sorted(found, key=lambda other: other.memory.total)[:count]


def _fastest(pricer: Pricer, layouts: list[Layout], count: int) -> list[Price]:
    """The `count` fastest, simulated by ascending bound."""
    found = Best(count, same=lambda layout: layout)
    bounds = ((pricer.bound_s(layout), layout) for layout in layouts)
    for bound_s, layout in sorted(bounds, key=lambda pair: pair[0]):
        if bound_s >= found.limit_s:
            break
        found.offer(pricer.price(layout))
    return found.prices


def microbatch_model(pricer: Pricer, layout: Layout) -> dict[int, float]:
    """b -> seconds of (b'/b + p - 1)(t_f(b) + t_b(b)), b' = B / d: Narayanan et al. 2021, equation
    1, with the times of the slowest stage."""
    per_replica = pricer.batch // layout.data
    times = {}
    for micro_size in divisors(per_replica):
        stages = pricer.stage_seconds(replace(layout, micro_size=micro_size))
        slowest = max(forward.total + backward.total for forward, backward in stages)
        times[micro_size] = (per_replica / micro_size + layout.pipeline - 1) * slowest
    return times


def heuristic(pricer: Pricer, space: Space) -> Price | None:
    """The layout of the paper's takeaways (Narayanan et al. 2021, sections 3.2 to 3.5): t up to
    what a node's devices and the model allow, then p, as few model-parallel ranks as fit; the rest
    is data-parallel; b by equation 1; recomputation in full. None if no such layout fits."""
    devices = pricer.cluster.node.devices
    within = replace(space, recompute="full", sequence_parallel=False)
    legal = [group for group in groups(within, pricer) if group.tensor <= devices]
    most = max((group.tensor for group in legal), default=1)
    legal = [group for group in legal if group.tensor == most or group.pipeline == 1]
    for group in sorted(legal, key=lambda g: (g.tensor * g.pipeline, g.micro_size)):
        if pricer.footprint(group).total > pricer.capacity_bytes:
            continue
        times = microbatch_model(pricer, group)
        for micro_size in sorted(times, key=lambda size: times[size]):
            layout = replace(group, micro_size=micro_size)
            if pricer.footprint(layout).total <= pricer.capacity_bytes:
                return pricer.price(layout)
    return None


def compute_optimal(flops: float, parameters: dict[str, int]) -> tuple[str, float, float]:
    """(preset, its tokens, the optimal number of parameters) for a training budget in FLOPs: C = 6
    N D and D = 20 N (Hoffmann et al. 2022), N nearest in ratio among `parameters`."""
    optimal = math.sqrt(flops / (6 * CHINCHILLA_TOKENS_PER_PARAMETER))
    name = min(parameters, key=lambda key: abs(math.log(parameters[key] / optimal)))
    return name, flops / (6 * parameters[name]), optimal
