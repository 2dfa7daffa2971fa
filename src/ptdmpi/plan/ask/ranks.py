"""How many ranks, and what a training costs: the best layout of each number of nodes."""

from dataclasses import dataclass
from typing import Any

from ptdmpi.base.words import counted
from ptdmpi.config.errors import InputError
from ptdmpi.plan.ask.answer import Panel, Reply
from ptdmpi.plan.ask.inverse import DAY_S, MODEL_FLOPS
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.search.search import search
from ptdmpi.plan.search.space import Space
from ptdmpi.plan.shape.parameters import parameter_count
from ptdmpi.plan.show import table
from ptdmpi.terminal.say import note

LEAST_STATE_BYTES = 2  # of a parameter on a device, whatever is shared out and offloaded


@dataclass(frozen=True)
class Cost:
    """What a whole training costs in its best layout; `megawatt_hours` is None where the cluster
    file has no power."""

    price: Price
    days: float
    rank_hours: float
    megawatt_hours: float | None

    @property
    def ranks(self) -> int:
        return self.price.layout.ranks


def cost(price: Price, pricer: Pricer, tokens: float) -> Cost:
    """What `tokens` of training take in that layout: whole nodes are paid for."""
    steps = tokens / (pricer.batch * pricer.model.config.seq_length)
    node, hours = pricer.cluster.node, steps * price.step_time_s / 3600
    paid = -(-price.layout.ranks // node.devices) * node.devices
    power = node.power_w
    energy = None if power is None else paid / node.devices * power * hours / 1e6
    return Cost(price, hours / 24, paid * hours, energy)


def ladder(devices: int, least: int, most: int) -> list[int]:
    """Numbers of ranks to look at: a node's devices times powers of two, or where that is more than
    there is, the powers of two below; and the most."""
    first = devices if devices <= most else 1
    rungs = []
    while first <= most:
        rungs.append(first)
        first *= 2
    return [rung for rung in [*rungs, *([most] if rungs[-1] != most else [])] if rung >= least]


def between(fewer: int, more: int, devices: int) -> list[int]:
    """Up to three numbers of ranks between two, in whole nodes."""
    fewer, more = fewer // devices, more // devices
    nodes = {fewer + (more - fewer) * part // 4 for part in (1, 2, 3)} - {fewer, more}
    return [count * devices for count in sorted(nodes)]


def answer(
    pricer: Pricer, most: int, tokens: float, days: float | None, price: float | None
) -> Reply:
    """Trainings on up to `most` ranks; `days`: the deadline, `price` of a rank-hour. Raises
    InputError if nothing fits, or nothing is done in time."""
    devices = pricer.cluster.node.devices
    count = parameter_count(pricer.model.config, pricer.model.vocab_size)
    least = LEAST_STATE_BYTES * count / pricer.capacity_bytes
    if days is not None:  # no fewer are in time at the peak
        least = max(least, MODEL_FLOPS * count * tokens / pricer.machine.peak / (days * DAY_S))
    rungs = ladder(devices, min(most, int(least)), most)
    found = _costs(pricer, rungs, tokens)
    if days is not None:
        late = [one.ranks for one in found if one.days > days]
        early = [one.ranks for one in found if one.days <= days]
        if late and early and min(early) > max(late) >= devices:
            found += _costs(pricer, between(max(late), min(early), devices), tokens)
    if not found:
        search(pricer, Space(most))  # says what is missing
    found.sort(key=lambda one: one.ranks)
    in_time = [one for one in found if days is None or one.days <= days]
    if not in_time:
        quickest = min(found, key=lambda one: one.days)
        raise InputError(
            f"{pricer.model.name} on {tokens:.3g} tokens takes {quickest.days:.1f} days on "
            f"{counted(quickest.ranks, 'rank')} of {pricer.cluster.name}, the best number of up to "
            f"{most:,}: not within {days:g} days"
        )
    best = min(in_time, key=lambda one: one.rank_hours)
    return _told(pricer, found, best, days, price)


def _costs(pricer: Pricer, rungs: list[int], tokens: float) -> list[Cost]:
    found = []
    for ranks in rungs:
        note(f"ptdmpi ask: searching layouts of {counted(ranks, 'rank')}")
        try:
            best = search(pricer, Space(ranks), 1)[0]
        except InputError:  # too few ranks for the model, or too many for the batch
            continue
        found.append(cost(best, pricer, tokens))
    return found


def _told(
    pricer: Pricer, found: list[Cost], best: Cost, days: float | None, price: float | None
) -> Reply:
    rows = [["ranks", "days", "rank-hours", *(["money"] if price else []), "MWh", "MFU", "layout"]]
    entries: list[dict[str, Any]] = []
    for one in found:
        entry = table.numbers(one.price, pricer, None)
        money = None if price is None else one.rank_hours * price
        energy = "" if one.megawatt_hours is None else f"{one.megawatt_hours:,.0f}"
        paid = [] if money is None else [f"{money:,.0f}"]
        told = "  <-" if one is best else ""
        mfu, words = f"{one.price.mfu:.1%}", f"{one.price.layout}, {table.settings(entry)}{told}"
        sizes = [f"{one.ranks}", f"{one.days:.1f}", f"{one.rank_hours:,.0f}"]
        rows.append([*sizes, *paid, energy, mfu, words])
        costs = {"days": one.days, "rank_hours": one.rank_hours, "money": money}
        entries.append({"ranks": one.ranks, **costs, "mwh": one.megawatt_hours, **entry})
    within = "" if days is None else f" of those done within {days:g} days"
    cheap = f"{best.days:.1f} days, {best.rank_hours:,.0f} rank-hours"
    cheap += "" if price is None else f", {best.rank_hours * price:,.0f} at {price:g} each"
    if best.megawatt_hours is not None:
        cheap += f", {best.megawatt_hours:,.0f} MWh"
    level = None if days is None else (days, f"{days:g} days")
    return Reply(
        f"The cheapest{within}: {counted(best.ranks, 'rank')} of {pricer.cluster.name}, {cheap}.",
        rows,
        {"best_ranks": best.ranks, "choices": entries},
        f"{pricer.model.name} on {pricer.cluster.name}: how many ranks",
        [
            Panel(
                "ranks",
                "days",
                {"days": [(one.ranks, one.days) for one in found]},
                level=level,
                logarithmic="xy",
            ),
            Panel(
                "ranks",
                "rank-hours",
                {"rank-hours": [(one.ranks, one.rank_hours) for one in found]},
                mark=(best.ranks, f"cheapest{' in time' if days else ''}: {best.ranks}"),
                logarithmic="x",
            ),
        ],
        (
            "without failures: `ptdmpi ask restarts` says what they cost; energy: nodes under "
            "load, without network and cooling",
        ),
    )
