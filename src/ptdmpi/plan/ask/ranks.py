"""`ptdmpi ask ranks`: the cost of a training on different numbers of ranks, each in its best
layout."""

from dataclasses import dataclass
from typing import Any

from ptdmpi.base.errors import InputError
from ptdmpi.base.say import note
from ptdmpi.base.words import counted
from ptdmpi.plan.ask.answer import Panel, Reply
from ptdmpi.plan.ask.inverse import DAY_S, MODEL_FLOPS
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.search.search import search
from ptdmpi.plan.search.space import Space
from ptdmpi.plan.shape.parameters import active_count, parameter_count
from ptdmpi.plan.show import table

# For each parameter, the ranks of a replica together need at least this many bytes of memory.
LEAST_STATE_BYTES = 2


@dataclass(frozen=True)
class Cost:
    """The cost of a whole training in a layout, for example in the best layout on a given number of
    ranks. `megawatt_hours` is None if the cluster file does not have the power of a node."""

    price: Price
    days: float
    rank_hours: float
    megawatt_hours: float | None

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the layout."""
        return self.price.layout.ranks


def cost(price: Price, pricer: Pricer, tokens: float) -> Cost:
    """Return the cost of training on `tokens` tokens in the layout of `price`. The cost includes
    all devices of each node, even those that are not used."""
    steps = tokens / (pricer.batch * pricer.model.config.seq_length)
    node = pricer.cluster.node
    hours = steps * price.step_time_s / 3600
    paid = -(-price.layout.ranks // node.devices) * node.devices
    energy = None
    if node.power_w is not None:
        energy = paid / node.devices * node.power_w * hours / 1e6
    return Cost(price, hours / 24, paid * hours, energy)


def ladder(devices: int, least: int, most: int) -> list[int]:
    """Return the numbers of ranks to try, from `least` to `most`. The numbers are powers of two
    times `devices`, the number of devices of a node, and `most` itself. If `devices` is greater
    than `most`, the numbers are powers of two, and `most` itself."""
    ranks = devices if devices <= most else 1
    rungs = []
    while ranks <= most:
        rungs.append(ranks)
        ranks *= 2
    if rungs[-1] != most:
        rungs.append(most)
    return [rung for rung in rungs if rung >= least]


def between(fewer: int, more: int, devices: int) -> list[int]:
    """Return up to three numbers of ranks between `fewer` and `more`, about equally far apart. Each
    is a multiple of `devices`, the number of devices of a node."""
    first = fewer // devices
    last = more // devices
    nodes = {first + (last - first) * part // 4 for part in (1, 2, 3)} - {first, last}
    return [count * devices for count in sorted(nodes)]


def answer(
    pricer: Pricer,
    most: int,
    tokens: float,
    *,
    days: float | None = None,
    price: float | None = None,
) -> Reply:
    """Return the answer with the number of ranks, up to `most`, on which a training with `tokens`
    tokens is cheapest.

    `days` is the deadline in days, or None if there is no deadline. `price` is the price of a
    rank-hour, or None. Raises InputError if no layout fits, or no training ends in time.
    """
    devices = pricer.cluster.node.devices
    count = parameter_count(pricer.model.config, pricer.model.vocab_size)
    least = LEAST_STATE_BYTES * count / pricer.capacity_bytes
    # with fewer ranks than this, the training would miss the deadline even at the peak FLOP/s
    if days is not None:
        active = active_count(pricer.model.config, pricer.model.vocab_size)
        least = max(least, MODEL_FLOPS * active * tokens / pricer.machine.peak / (days * DAY_S))
    rungs = ladder(devices, min(most, int(least)), most)
    costs = _costs(pricer, rungs, tokens)
    if days is not None:
        late = [known.ranks for known in costs if known.days > days]
        early = [known.ranks for known in costs if known.days <= days]
        if late and early and min(early) > max(late) >= devices:
            costs += _costs(pricer, between(max(late), min(early), devices), tokens)
    if not costs:
        search(pricer, Space(most))  # this raises an error that explains why no layout fits
    costs.sort(key=lambda known: known.ranks)
    in_time = [known for known in costs if days is None or known.days <= days]
    if not in_time:
        quickest = min(costs, key=lambda known: known.days)
        raise InputError(
            f"{pricer.model.name} on {tokens:.3g} tokens takes {quickest.days:.1f} days on "
            f"{counted(quickest.ranks, 'rank')} of {pricer.cluster.name}, the best number of up to "
            f"{most:,}: not within {days:g} days"
        )
    best = min(in_time, key=lambda known: known.rank_hours)
    return _reply(pricer, costs, best, days=days, price=price)


def _costs(pricer: Pricer, rungs: list[int], tokens: float) -> list[Cost]:
    """Return the cost of a training on `tokens` tokens for each number of ranks in `rungs`. Numbers
    of ranks for which no layout is legal and fits into memory are left out."""
    costs = []
    for ranks in rungs:
        note(f"ptdmpi ask: searching layouts of {counted(ranks, 'rank')}")
        try:
            best = search(pricer, Space(ranks), 1)[0]
        except InputError:  # too few ranks for the model, or too many for the batch
            continue
        costs.append(cost(best, pricer, tokens))
    return costs


def _row(cost: Cost, entry: dict[str, Any], money: float | None, *, is_best: bool) -> list[str]:
    """Return the row of the printed table for one number of ranks. `entry` has the same facts for
    the JSON output, `money` is the price of the training, and `is_best` is True for the cheapest
    number of ranks."""
    row = [f"{cost.ranks}", f"{cost.days:.1f}", f"{cost.rank_hours:,.0f}"]
    if money is not None:
        row.append(f"{money:,.0f}")
    energy = ""
    if cost.megawatt_hours is not None:
        energy = f"{cost.megawatt_hours:,.0f}"
    mark = "  <-" if is_best else ""
    layout = f"{cost.price.layout}, {table.settings(entry)}{mark}"
    return [*row, energy, f"{cost.price.mfu:.1%}", layout]


def _sentence(pricer: Pricer, best: Cost, days: float | None, price: float | None) -> str:
    """Return the printed sentence that names the cheapest number of ranks (`best`) and its cost.
    `days` is the deadline, and `price` is the price of a rank-hour."""
    within = ""
    if days is not None:
        within = f" of those done within {days:g} days"
    costs = f"{best.days:.1f} days, {best.rank_hours:,.0f} rank-hours"
    if price is not None:
        costs += f", {best.rank_hours * price:,.0f} at {price:g} each"
    if best.megawatt_hours is not None:
        costs += f", {best.megawatt_hours:,.0f} MWh"
    ranks = counted(best.ranks, "rank")
    return f"The cheapest{within}: {ranks} of {pricer.cluster.name}, {costs}."


def _reply(
    pricer: Pricer, costs: list[Cost], best: Cost, *, days: float | None, price: float | None
) -> Reply:
    """Return the complete answer, with its sentence, its table and its diagrams. `costs` has the
    cost for each number of ranks, and `best` is the cheapest of them. `days` is the deadline, and
    `price` is the price of a rank-hour."""
    header = ["ranks", "days", "rank-hours", "MWh", "MFU", "layout"]
    if price is not None:
        header.insert(3, "money")
    rows = [header]
    entries: list[dict[str, Any]] = []
    for known in costs:
        entry = table.numbers(known.price, pricer, None)
        money = None if price is None else known.rank_hours * price
        rows.append(_row(known, entry, money, is_best=known is best))
        entries.append(
            {
                "ranks": known.ranks,
                "days": known.days,
                "rank_hours": known.rank_hours,
                "money": money,
                "mwh": known.megawatt_hours,
                **entry,
            }
        )
    level = None
    if days is not None:
        level = (days, f"{days:g} days")
    in_time = " in time" if days else ""
    return Reply(
        short=_sentence(pricer, best, days, price),
        rows=rows,
        numbers={"best_ranks": best.ranks, "choices": entries},
        title=f"{pricer.model.name} on {pricer.cluster.name}: how many ranks",
        panels=[
            Panel(
                "ranks",
                "days",
                {"days": [(known.ranks, known.days) for known in costs]},
                level=level,
                logarithmic="xy",
            ),
            Panel(
                "ranks",
                "rank-hours",
                {"rank-hours": [(known.ranks, known.rank_hours) for known in costs]},
                mark=(best.ranks, f"cheapest{in_time}: {best.ranks:,}"),
                logarithmic="x",
            ),
        ],
        notes=(
            "without failures: `ptdmpi ask restarts` says what they cost; energy: nodes under "
            "load, without network and cooling",
        ),
    )
