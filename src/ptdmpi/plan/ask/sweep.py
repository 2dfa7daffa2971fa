"""The best layout for each of several batch sizes or sequence lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ptdmpi.base.errors import InputError
from ptdmpi.base.say import note
from ptdmpi.base.words import counted
from ptdmpi.plan.ask.answer import Panel, Reply
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.search.search import search
from ptdmpi.plan.search.space import Space
from ptdmpi.plan.show import table


def batches(pricer: Pricer, sizes: Sequence[int]) -> dict[int, Pricer]:
    """Return pricers of the same model with other global batches, as a dict from the batch size in
    sequences to the pricer."""
    cluster, model, dtype = pricer.cluster, pricer.model, pricer.machine.dtype
    return {size: Pricer.of(cluster, model, size, dtype) for size in sizes}


def lengths(pricer: Pricer, sizes: Sequence[int]) -> dict[int, Pricer]:
    """Return pricers of the same model with other sequence lengths, as a dict from the length in
    tokens to the pricer. All pricers have the same number of tokens in a step, so the batch changes
    with the length.

    Raises InputError if the number of tokens in a step is not a multiple of a length.
    """
    tokens = pricer.batch * pricer.model.config.seq_length
    pricers = {}
    for size in sizes:
        batch, rest = divmod(tokens, size)
        if rest or not batch:
            raise InputError(
                f"a step of {tokens:,} tokens is not a whole number of sequences of {size}"
            )
        config = pricer.model.config.model_copy(update={"seq_length": size})
        model = replace(pricer.model, config=config)
        pricers[size] = Pricer.of(pricer.cluster, model, batch, pricer.machine.dtype)
    return pricers


def answer(pricers: Mapping[int, Pricer], ranks: int, over: str) -> Reply:
    """Return the best layout on `ranks` ranks for each pricer. The keys of `pricers` are batch
    sizes (`over` is "batch") or sequence lengths (`over` is "sequence length").

    Raises InputError if there is no pricer for which a layout fits.
    """
    fastest: list[tuple[int, Pricer, Price]] = []
    reason = ""
    for size, pricer in pricers.items():
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
    of_all = next(iter(pricers.values()))
    where = f"{counted(ranks, 'rank')} of {of_all.cluster.name}"
    notes = []
    if left := [f"{size:,}" for size in pricers if size not in {size for size, _, _ in fastest}]:
        notes.append(f"no layout fits at {', '.join(left)}")
    return Reply(
        short=f"On {where}, a {over} of {best[0]:,.0f} gives the most tokens per second: "
        f"{best[1]:,.0f} per rank; {least[0]:,.0f} gives {least[1] / best[1]:.0%} of that.",
        rows=rows,
        numbers={"ranks": ranks, "choices": entries},
        title=f"{of_all.model.name} on {where}: by {over}",
        panels=[
            Panel(over, "tokens/s per rank", {"tokens/s": speeds}, logarithmic="x"),
            Panel(
                over,
                "MFU",
                {"MFU": [(size, price.mfu) for size, _, price in fastest]},
                logarithmic="x",
            ),
        ],
        notes=notes,
    )
