"""Advice on layouts: the changes that make a layout faster, and the layout that the rules of
Narayanan et al. 2021 choose."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ptdmpi.base.near import divisors
from ptdmpi.config.choices import OFFLOADS, RECOMPUTE_MODES, default_schedule
from ptdmpi.config.layout import LETTERS, Layout
from ptdmpi.config.zero import STAGES, covers_state
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.layer.legality import is_legal
from ptdmpi.plan.search.search import Best
from ptdmpi.plan.search.space import (
    Space,
    context_methods,
    contexts,
    groups,
    least_recomputed,
    of_a_node,
    sharding_words,
    shardings,
)

MOST_ADVICE = 3  # Largest number of layouts that are proposed.
# Fields of a Layout whose values are True or False.
SWITCHES = ("sequence_parallel", "scatter_gather", "partition_activations", "dp_overlap")


def neighbours(layout: Layout, pricer: Pricer) -> Iterator[Layout]:
    """Yield every legal layout that differs from `layout` by one change: another value of one
    setting, or some ranks moved from one axis to another."""
    tried = list(_moved_ranks(layout, pricer))
    for micro_size in {layout.micro_size // 2, layout.micro_size * 2} - {0}:
        tried.append(replace(layout, micro_size=micro_size))
    for virtual in {1, layout.virtual - 1, layout.virtual + 1, 2 * layout.virtual} - {0}:
        tried.append(replace(layout, virtual=virtual, schedule=default_schedule(virtual)))
    if layout.stages > 1:
        own = len(pricer.memory.stages.split(layout)[0])
        tried += [replace(layout, first_layers=first) for first in (own - 1, own + 1) if first]
    other_schedule = "gpipe"
    if layout.schedule == "gpipe":
        other_schedule = default_schedule(layout.virtual)
    tried.append(replace(layout, schedule=other_schedule))
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
    if layout.copies > 1:
        stages = [zero for zero in STAGES if covers_state(zero) or not layout.shard_group]
        tried += [replace(layout, zero=zero) for zero in stages]
        node = of_a_node(pricer, layout)
        shard_groups: set[int | None] = {None}
        if 1 < node < layout.copies and covers_state(layout.zero):
            shard_groups.add(node)
        tried += [replace(layout, shard_group=group) for group in shard_groups]
    places = (place for place in OFFLOADS if not pricer.cluster.lacks(place))
    tried += [replace(layout, offload=place) for place in places]
    methods = context_methods(Space(layout.ranks), layout.context)
    tried += [replace(layout, context_method=method) for method in methods]
    for changed in tried:
        if changed != layout and is_legal(changed, pricer.model.config, pricer.batch):
            yield changed


def _moved_ranks(layout: Layout, pricer: Pricer) -> Iterator[Layout]:
    """Yield each layout in which half of the ranks of one axis are moved to another axis. The
    context axis may grow only up to the largest size that `contexts` in `space.py` returns."""
    sizes = ["tensor", "pipeline", "data"]
    most = contexts(Space(layout.ranks), pricer.model.config)[-1]
    if max(most, layout.context) > 1:
        sizes.append("context")
    for source, target in itertools.permutations(sizes, 2):
        ranks = getattr(layout, source)
        if ranks % 2 == 0:
            moved = {source: ranks // 2, target: getattr(layout, target) * 2}
            changed = replace(layout, **moved)
            if changed.context <= max(most, layout.context):
                yield changed


def difference(layout: Layout, changed: Layout) -> str:
    """Return the settings of `changed` that differ from `layout`, as options of the command
    line."""
    words = [
        f"{letter}={getattr(changed, name)}"
        for letter, name in LETTERS.items()
        if getattr(changed, name) != getattr(layout, name)
    ]
    kinds = {layout.schedule, changed.schedule}
    # Unless one schedule is GPipe, the number of chunks already says which schedule it is.
    if len(kinds) == 2 and "gpipe" in kinds:
        words.append(f"--schedule {changed.schedule}")
    before = (layout.recompute, layout.recompute_layers)
    if (changed.recompute, changed.recompute_layers) != before:
        option = ""
        if changed.recompute_layers is not None:
            option = f" --recompute-layers {changed.recompute_layers}"
        words.append(f"recompute {changed.recompute}{option}")
    if changed.first_layers != layout.first_layers:
        words.append(f"--first-layers {changed.first_layers}")
    for key in SWITCHES:
        if (on := getattr(changed, key)) != getattr(layout, key):
            words.append(f"--{'' if on else 'no-'}{key.replace('_', '-')}")
    if changed.context_method != layout.context_method:
        words.append(f"--context-method {changed.context_method}")
    words += [sharding_words(changed, layout)] * (sharding_words(changed, layout) != "")
    return ", ".join(words)


def improvements(price: Price, pricer: Pricer) -> tuple[int, list[Price]]:
    """Return at most `MOST_ADVICE` layouts that are better than the layout of `price`, as (number
    of changes, prices). Each returned layout differs from the layout of `price` by one or two
    changes. The returned number of changes is 2 if any of these layouts needs two changes, and 1
    otherwise.

    If the layout of `price` fits into memory, the result has the fastest layouts after a single
    change. If this layout does not fit, the result has the fastest layouts that fit after one or
    two changes. If no layout fits even after two changes, the result has the layouts that need the
    least memory after a single change."""
    single = list(neighbours(price.layout, pricer))
    if price.fits:
        prices = (pricer.price(layout) for layout in single)
        faster = [
            other
            for other in prices
            if other.step_time_s < price.step_time_s
            and other.fits
            and other.memory.total <= pricer.usable_bytes
        ]
        return 1, sorted(faster, key=lambda other: other.step_time_s)[:MOST_ADVICE]
    double = {twice for layout in single for twice in neighbours(layout, pricer)} - {price.layout}
    fitting = [layout for layout in {*single, *double} if pricer.fits(layout)]
    best = Best(MOST_ADVICE, same=lambda layout: layout)
    best.offer_all(pricer, fitting)
    if best.prices:
        return 1 + any(other.layout not in single for other in best.prices), best.prices
    prices = (pricer.price(layout) for layout in single)
    return 1, sorted(prices, key=lambda other: other.memory.total)[:MOST_ADVICE]


def microbatch_model(pricer: Pricer, layout: Layout) -> dict[int, float]:
    """Return a dict from each microbatch size b to the seconds of a step, (b'/b + p - 1)(t_f(b) +
    t_b(b)). In this formula, b' is the number of sequences that a replica processes in a step, and
    p is the number of pipeline ranks.

    t_f and t_b are the times of forward and backward in the slowest stage (Narayanan et al. 2021,
    equation 1).
    """
    per_replica = pricer.batch // layout.data
    times = {}
    for micro_size in divisors(per_replica):
        sized = replace(layout, micro_size=micro_size)
        stages = pricer.times.stage_seconds(sized, sized.microbatches(pricer.batch))
        slowest = max(forward.total + backward.total for forward, backward in stages)
        times[micro_size] = (per_replica / micro_size + layout.pipeline - 1) * slowest
    return times


def heuristic(pricer: Pricer, space: Space) -> Price | None:
    """Return the price of the layout that follows from the rules ("takeaways") of Narayanan et al.
    2021, sections 3.2 to 3.5.

    A replica has the smallest number of ranks with which the model fits into memory. A pipeline is
    used only together with the largest tensor-parallel size that the model and the number of
    devices per node allow. The remaining ranks are data-parallel. The microbatch size is the best
    one by equation 1 of the paper (`microbatch_model`). All activations are recomputed. Returns
    None if no such layout fits.
    """
    devices = pricer.cluster.node.devices
    within = replace(space, recompute="full", sequence_parallel=False, cuts_sequences=False)
    legal = [
        ways[0].of(group)
        for group in groups(within, pricer)
        if group.tensor <= devices and (ways := shardings(space, pricer, group))
    ]
    most = max((group.tensor for group in legal), default=1)
    legal = [group for group in legal if group.tensor == most or group.pipeline == 1]
    for group in sorted(legal, key=lambda g: (g.tensor * g.pipeline, g.micro_size)):
        if pricer.footprint(group).total > pricer.usable_bytes:
            continue
        times = microbatch_model(pricer, group)
        for micro_size in sorted(times, key=lambda size: times[size]):
            layout = replace(group, micro_size=micro_size)
            if pricer.footprint(layout).total <= pricer.usable_bytes:
                return pricer.price(layout)
    return None
