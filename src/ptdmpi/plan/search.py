"""Every legal layout, and the best of them: exhaustive, with bounds that cannot lose the best.

Three bounds of a layout's step time, each cheaper and no larger than the next: of the mean rank
(`Pricer.rough_bound_s`), of every rank (`Pricer.bound_s`), the simulation itself. Layouts are
looked at by ascending first bound, simulated by ascending second one, and the search ends where
neither the next first bound nor the next second one is below the slowest layout that is kept: no
layout behind can be among the best. So the result is that of simulating all of them, and learned or
approximate searches have nothing to add.
"""

import bisect
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ptdmpi.config import InputError
from ptdmpi.config.rules import divisors
from ptdmpi.plan.layout import RECOMPUTE_MODES, Layout, mistakes
from ptdmpi.plan.price import Price, Pricer
from ptdmpi.plan.schedule import default_kind

CHINCHILLA_TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022 (arXiv 2203.15556), Table 3


@dataclass(frozen=True)
class Space:
    """What the search may choose from; None leaves a setting to it."""

    ranks: int
    schedule: str | None = None
    recompute: str | None = None
    sequence_parallel: bool | None = None
    scatter_gather: bool = True
    zero: int = 0
    dp_overlap: bool = False

    @property
    def settings(self) -> dict[str, object]:
        """Those of a Layout that are the same in the whole space."""
        return {
            "scatter_gather": self.scatter_gather,
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
            if pipeline > config.layers or batch % data:
                continue
            for micro_size in divisors(batch // data):
                base = Layout(tensor, pipeline, data, 1, micro_size, **space.settings)
                for sequence_parallel in parallel:
                    for mode in modes:
                        layout = replace(base, sequence_parallel=sequence_parallel, recompute=mode)
                        if not any(mistakes(layout, config, batch)):
                            yield layout


def chunked(space: Space, group: Layout, layers: int) -> Iterator[Layout]:
    """The layouts of a group: every v, under the schedule asked for or its default. One stage alone
    has nothing to interleave."""
    most = layers // group.pipeline if group.pipeline > 1 else 1
    for virtual in range(1, most + 1):
        kind = space.schedule or default_kind(virtual)
        if kind == "1f1b" and virtual > 1:
            return
        yield replace(group, virtual=virtual, schedule=kind)


class Best:
    """The `count` fastest prices seen, fastest first."""

    def __init__(self, count: int) -> None:
        self.count, self.prices = count, []

    @property
    def limit_s(self) -> float:
        """What a layout must be faster than to be kept."""
        return self.prices[-1].step_time_s if len(self.prices) == self.count else math.inf

    def offer(self, price: Price) -> None:
        bisect.insort(self.prices, price, key=lambda kept: kept.step_time_s)
        del self.prices[self.count :]


def search(pricer: Pricer, space: Space, count: int = 5) -> list[Price]:
    """The `count` fastest layouts that fit, fastest first. Raises InputError if none fits or is
    legal."""
    legal, layers = list(groups(space, pricer)), pricer.model.config.layers
    layouts = [layout for group in legal for layout in chunked(space, group, layers)]
    rough = sorted((pricer.rough_bound_s(layout), i) for i, layout in enumerate(layouts))
    found, waiting = Best(count), []  # waiting: heap of (bound, number) that fit
    for rough_s, number in [*rough, (math.inf, -1)]:
        while waiting and waiting[0][0] <= rough_s and waiting[0][0] < found.limit_s:
            found.offer(pricer.price(layouts[heapq.heappop(waiting)[1]]))
        if rough_s >= found.limit_s or number < 0:
            break
        layout = layouts[number]
        if pricer.fits(layout):
            heapq.heappush(waiting, (pricer.bound_s(layout), number))
    if not found.prices:
        raise InputError(_nothing_fits(pricer, space, legal))
    return found.prices


def _nothing_fits(pricer: Pricer, space: Space, legal: list[Layout]) -> str:
    where = f"{space.ranks} ranks of {pricer.cluster.name}"
    if not legal:
        return (
            f"no layout of {pricer.model.name} is legal on {where}: with a batch of "
            f"{pricer.batch}, d b must divide the batch for some t p d = {space.ranks}"
        )
    least = min(legal, key=lambda layout: pricer.memory(layout).total)
    needed = pricer.memory(least).total
    return (
        f"no layout of {pricer.model.name} fits on {where}: the least that one needs is "
        f"{needed / 2**30:.1f} GiB per rank ({least}, recompute {least.recompute}) of "
        f"{pricer.capacity_bytes / 2**30:.1f}; take more ranks, or --zero 1 to 3"
    )


def neighbours(layout: Layout, pricer: Pricer) -> Iterator[tuple[str, Layout]]:
    """(what is changed, layout) for every legal layout that differs in one decision: a setting, or
    ranks moved from one axis to another."""
    sizes = {"t": layout.tensor, "p": layout.pipeline, "d": layout.data}
    names = {"t": "tensor", "p": "pipeline", "d": "data"}
    tried: list[tuple[str, Layout]] = []
    for source in sizes:
        for target in sizes:
            if source != target and sizes[source] % 2 == 0:
                moved = {**sizes, source: sizes[source] // 2, target: sizes[target] * 2}
                change = {names[key]: size for key, size in moved.items()}
                text = f"{source}={moved[source]}, {target}={moved[target]}"
                tried.append((text, replace(layout, **change)))
    for factor in (0.5, 2):
        size = int(layout.micro_size * factor)
        if size:
            tried.append((f"b={size}", replace(layout, micro_size=size)))
    for virtual in {1, layout.virtual - 1, layout.virtual + 1, 2 * layout.virtual}:
        if virtual >= 1:
            changed = replace(layout, virtual=virtual, schedule=default_kind(virtual))
            tried.append((f"v={virtual}", changed))
    for mode in RECOMPUTE_MODES:
        tried.append((f"recompute {mode}", replace(layout, recompute=mode)))
    for key in ("sequence_parallel", "scatter_gather", "dp_overlap"):
        word = key.replace("_", "-")
        on = not getattr(layout, key)
        tried.append((f"--{'' if on else 'no-'}{word}", replace(layout, **{key: on})))
    for zero in range(4):
        tried.append((f"--zero {zero}", replace(layout, zero=zero)))
    for text, changed in tried:
        if changed != layout and not any(mistakes(changed, pricer.model.config, pricer.batch)):
            yield text, changed


def improvements(price: Price, pricer: Pricer, count: int = 3) -> list[tuple[str, Price]]:
    """The single changes that help most: to fit, by the least slowdown, else to be faster."""
    priced = [(text, pricer.price(layout)) for text, layout in neighbours(price.layout, pricer)]
    fitting = [(text, other) for text, other in priced if other.fits]
    if price.fits:
        fitting = [pair for pair in fitting if pair[1].step_time_s < price.step_time_s]
    if not fitting and not price.fits:  # no single change suffices: those that save most memory
        return sorted(priced, key=lambda pair: pair[1].memory.total)[:count]
    return sorted(fitting, key=lambda pair: pair[1].step_time_s)[:count]


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
    """The layout of the paper's takeaways (Narayanan et al. 2021, sections 3.2 to 3.5): t up to the
    devices of a node, then p, as few model-parallel ranks as fit; the rest is data-parallel; b by
    equation 1; recomputation in full. None if no such layout fits."""
    devices = pricer.cluster.node.devices
    legal = [
        group
        for group in groups(replace(space, recompute="full", sequence_parallel=False), pricer)
        if group.tensor <= devices and (group.tensor == devices or group.pipeline == 1)
    ]
    for group in sorted(legal, key=lambda g: (g.tensor * g.pipeline, g.micro_size)):
        if pricer.memory(group).total > pricer.capacity_bytes:
            continue
        times = microbatch_model(pricer, group)
        for micro_size in sorted(times, key=lambda size: times[size]):
            layout = replace(group, micro_size=micro_size)
            if pricer.memory(layout).total <= pricer.capacity_bytes:
                return pricer.price(layout)
    return None


def compute_optimal(flops: float, parameters: dict[str, int]) -> tuple[str, float, float]:
    """(preset, its tokens, the optimal number of parameters) for a training budget in FLOPs: C = 6
    N D and D = 20 N (Hoffmann et al. 2022), N nearest in ratio among `parameters`."""
    optimal = math.sqrt(flops / (6 * CHINCHILLA_TOKENS_PER_PARAMETER))
    name = min(parameters, key=lambda key: abs(math.log(parameters[key] / optimal)))
    return name, flops / (6 * parameters[name]), optimal
