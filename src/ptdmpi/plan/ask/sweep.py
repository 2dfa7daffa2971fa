"""The best layout at each of several batches or sequence lengths."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ptdmpi.base.errors import InputError
from ptdmpi.base.words import counted
from ptdmpi.plan.ask.answer import Panel, Reply
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.search.search import search
from ptdmpi.plan.search.space import Space
from ptdmpi.plan.show import table
from ptdmpi.terminal.say import note


def batches(pricer: Pricer, sizes: Sequence[int]) -> list[Pricer]:
    """Return pricers of the same model at other global batches."""
    cluster, model, dtype = pricer.cluster, pricer.model, pricer.machine.dtype
    return [Pricer.of(cluster, model, size, dtype) for size in sizes]


def lengths(pricer: Pricer, sizes: Sequence[int]) -> list[Pricer]:
    """Return pricers of the same model at other sequence lengths, with as many tokens in a step.

    Raises InputError if that is not a whole number of sequences.
    """
    tokens = pricer.batch * pricer.model.config.seq_length
    pricers = []
    for size in sizes:
        batch, rest = divmod(tokens, size)
        if rest or not batch:
            raise InputError(f"a step of {tokens:,} tokens is no number of sequences of {size}")
        config = pricer.model.config.model_copy(update={"seq_length": size})
        model = replace(pricer.model, config=config)
        pricers.append(Pricer.of(pricer.cluster, model, batch, pricer.machine.dtype))
    return pricers


def answer(pricers: Sequence[Pricer], ranks: int, over: str) -> Reply:
    """Return the best layout of each pricer; `over`: "batch" or "sequence length".

    Raises InputError if no pricer has a layout that fits.
    """
    fastest: list[tuple[int, Pricer, Price]] = []
    reason = ""
    for pricer in pricers:
        size = pricer.batch if over == "batch" else pricer.model.config.seq_length
        note(f"ptdmpi ask: searching layouts at a {over} of {size:,}")
        try:
            fastest.append((size, pricer, search(pricer, Space(ranks), 1)[0]))
        except InputError as error:
            reason = str(error)
    if not fastest:
        raise InputError(reason)
    rows = [[over, "step", "tokens/s per rank", "MFU", "bubble", "layout"]]
    entries: list[dict[str, Any]] = []
    speeds: list[tuple[float, float]] = []
    for size, pricer, price in fastest:
        entry = table.numbers(price, pricer, None)
        tokens = pricer.batch * pricer.model.config.seq_length
        speeds.append((float(size), tokens / price.step_time_s / ranks))
        step, speed = f"{price.step_time_s:.2f} s", f"{speeds[-1][1]:,.0f}"
        shares = [f"{price.mfu:.1%}", f"{price.bubble_fraction:.1%}"]
        words = f"{price.layout}, {table.settings(entry)}"
        rows.append([f"{size:,}", step, speed, *shares, words])
        entries.append({over.replace(" ", "_"): size, "tokens_per_s": tokens / price.step_time_s})
        entries[-1] |= entry
    best, least = (choose(speeds, key=lambda point: point[1]) for choose in (max, min))
    where = f"{counted(ranks, 'rank')} of {pricers[0].cluster.name}"
    left = [f"{p.batch if over == 'batch' else p.model.config.seq_length:,}" for p in pricers]
    left = [size for size in left if size not in {row[0] for row in rows}]
    return Reply(
        f"On {where} most tokens per second come at a {over} of {best[0]:,.0f}: {best[1]:,.0f} per "
        f"rank; at {least[0]:,.0f} it is {least[1] / best[1]:.0%} of that.",
        rows,
        {"ranks": ranks, "choices": entries},
        f"{pricers[0].model.name} on {where}: by {over}",
        [
            Panel(over, "tokens/s per rank", {"tokens/s": speeds}, logarithmic="x"),
            Panel(
                over,
                "MFU",
                {"MFU": [(size, price.mfu) for size, _, price in fastest]},
                logarithmic="x",
            ),
        ],
        [f"no layout fits at {', '.join(left)}"] if left else (),
    )
