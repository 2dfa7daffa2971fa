"""Advice about layouts: changes that help one, and what the paper's rules would choose."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ptdmpi.base.near import divisors
from ptdmpi.config.choices import OFFLOADS, RECOMPUTE_MODES, default_schedule
from ptdmpi.config.layout import LETTERS, Layout
from ptdmpi.config.legality import is_legal
from ptdmpi.config.zero import STAGES, covers_state
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.search.search import Best
from ptdmpi.plan.search.space import (
    Space,
    groups,
    least_recomputed,
    of_a_node,
    sharding_words,
    shardings,
)

# of a Layout
SWITCHES = ("sequence_parallel", "scatter_gather", "partition_activations", "dp_overlap")


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
    if layout.stages > 1:
        own = len(pricer.memory.split(layout)[0])
        tried += [replace(layout, first_layers=first) for first in (own - 1, own + 1) if first]
    other = default_schedule(layout.virtual) if layout.schedule == "gpipe" else "gpipe"
    tried.append(replace(layout, schedule=other))
    for mode in RECOMPUTE_MODES:
        kept = layout.partition_activations and mode == "full"
        whole = replace(layout, recompute=mode, recompute_layers=None)
        tried.append(replace(whole, partition_activations=kept))
    if layout.recompute_layers is None:
        bare = replace(layout, recompute="none", partition_activations=False)
        space = Space(layout.ranks, partition_activations=layout.partition_activations)
        tried += least_recomputed(pricer, space, bare)
    for key in SWITCHES:
        switched: dict[str, Any] = {key: not getattr(layout, key)}
        tried.append(replace(layout, **switched))
    if layout.data > 1:
        stages = [zero for zero in STAGES if covers_state(zero) or not layout.shard_group]
        tried += [replace(layout, zero=zero) for zero in stages]
        node = of_a_node(pricer, layout)
        groups_of = {None, node} if 1 < node < layout.data and covers_state(layout.zero) else {None}
        tried += [replace(layout, shard_group=group) for group in groups_of]
    places = (place for place in OFFLOADS if not pricer.cluster.lacks(place))
    tried += [replace(layout, offload=place) for place in places]
    for changed in tried:
        if changed != layout and is_legal(changed, pricer.model.config, pricer.batch):
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
    modes = [(one.recompute, one.recompute_layers) for one in (layout, changed)]
    if modes[0] != modes[1]:
        layers = changed.recompute_layers
        some = "" if layers is None else f" --recompute-layers {layers}"
        words.append(f"recompute {changed.recompute}{some}")
    if changed.first_layers != layout.first_layers:
        words.append(f"--first-layers {changed.first_layers}")
    for key in SWITCHES:
        if (on := getattr(changed, key)) != getattr(layout, key):
            words.append(f"--{'' if on else 'no-'}{key.replace('_', '-')}")
    words += [sharding_words(changed, layout)] * (sharding_words(changed, layout) != "")
    return ", ".join(words)


def improvements(price: Price, pricer: Pricer, count: int = 3) -> tuple[int, list[Price]]:
    """(the most changes that one is away, the layouts that help most): of a layout that fits the
    fastest one change away; of one that does not, the fastest that fit, one or two changes away.
    Where no two make it fit, the single ones that save most memory."""
    single = list(neighbours(price.layout, pricer))
    if price.fits:
        found = (pricer.price(layout) for layout in single)
        faster = [one for one in found if one.fits and one.step_time_s < price.step_time_s]
        return 1, sorted(faster, key=lambda other: other.step_time_s)[:count]
    double = {two for one in single for two in neighbours(one, pricer)} - {price.layout}
    best = _fastest(pricer, [one for one in {*single, *double} if pricer.fits(one)], count)
    if best:
        return 1 + any(one.layout not in single for one in best), best
    found = (pricer.price(layout) for layout in single)
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
    legal = [
        ways[0].of(group)
        for group in groups(within, pricer)
        if group.tensor <= devices and (ways := shardings(space, pricer, group))
    ]
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
