"""`python -m benchmarks.planning.long_sequences`: memory and time of training, depending on the
length of a sequence.

The command draws docs/pictures/long-sequences.png. The picture has predictions of LLaMA 8B on H100s
from 2,048 to 1,048,576 positions, and measurements of a small LLaMA on this machine. Measured times
are drawn only if no other program runs on this machine.

`python -m benchmarks.planning.long_sequences documents` prints only how unequal the work of context
ranks is if sequences have several documents.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.launch import ROOT
from benchmarks.planning.figures import COLORS
from benchmarks.planning.long_here import LongStep, long_step
from ptdmpi.config import InputError
from ptdmpi.config.layout import Layout
from ptdmpi.model.sequence.positions import Positions
from ptdmpi.plan.cost.price import Price, Pricer
from ptdmpi.plan.machine.cluster import load_cluster, load_model
from ptdmpi.plan.search.search import search
from ptdmpi.plan.search.space import LEAST_POSITIONS, Space
from ptdmpi.plan.show.table import lines, numbers, settings

PICTURE = ROOT / "docs/pictures/long-sequences.png"
MODEL, CLUSTER, RANKS = "llama3-8b", "dgx-h100", 128
STEP_TOKENS = 2**22
LENGTHS = tuple(2**power for power in range(11, 21))
DATA, TENSOR = 4, 8  # data-parallel and tensor-parallel sizes of the layouts whose memory is drawn
HERE_CONTEXTS, HERE_LENGTHS = (1, 2, 4), (1024, 2048, 4096, 8192)
# the machine counts as quiet if its load average (the mean number of processes that run or wait for
# a core) is below this number
QUIET_LOAD = 0.5
GIB, MIB = 2**30, 2**20
# the sequences with several documents: their length, the number of context ranks, the mean lengths
# of documents, and the number of sequences that are drawn for each mean length
PACKED_LENGTH, PACKED_CONTEXT = 131_072, 8
MEAN_DOCUMENTS = (1024, 8192, 32_768)
PACKED_DRAWS = 200


def pricer(length: int) -> Pricer:
    """Return the object that predicts the time and memory of steps of `STEP_TOKENS` tokens in
    sequences of `length` tokens."""
    model = load_model(f"{MODEL},s={length}")
    return Pricer.of(load_cluster(CLUSTER), model, STEP_TOKENS // length, "bf16")


def memory(length: int) -> dict[str, float]:
    """Return the predicted memory of a rank in bytes for three layouts, by the name of the layout.
    A microbatch has one sequence of `length` tokens."""
    shared = Layout(TENSOR, 1, DATA, sequence_parallel=True, zero=1)
    layouts = {
        f"t = {TENSOR}": shared,
        f"t = {TENSOR}, full recomputation": shared.changed(recompute="full"),
        f"t = {TENSOR}, c = s / {LEAST_POSITIONS:,}": shared.changed(
            context=max(1, length // LEAST_POSITIONS)
        ),
    }
    of = pricer(length)
    return {name: of.footprint(layout).total for name, layout in layouts.items()}


def best(length: int, *, cuts: bool) -> Price | None:
    """Return the predicted time and memory of the fastest layout that fits into memory; None if no
    layout fits. If `cuts` is True, layouts with context parallelism are searched, too."""
    try:
        return search(pricer(length), Space(RANKS, cuts_sequences=cuts), 1)[0]
    except InputError:
        return None


def predictions() -> dict[str, dict[int, Price]]:
    """Return the fastest layouts that fit, with and without context parallelism, by the name of the
    search and by the sequence length."""
    found: dict[str, dict[int, Price]] = {"c searched": {}, "c = 1": {}}
    for length in LENGTHS:
        for name, cuts in (("c searched", True), ("c = 1", False)):
            price = best(length, cuts=cuts)
            if price is not None:
                found[name][length] = price
    return found


def rate(price: Price) -> float:
    """Return the predicted tokens per second of a rank."""
    return STEP_TOKENS / price.step_time_s / price.layout.ranks


def prediction_table(found: dict[str, dict[int, Price]]) -> list[list[str]]:
    """Return a table of the best layouts, with rows for each sequence length."""
    rows = [["s", "", "tokens/s per rank", "memory", "layout"]]
    for length in LENGTHS:
        for name, prices in found.items():
            row = [f"{length:,}", name, "-", "-", "no layout fits"]
            if length in prices:
                price = prices[length]
                words = settings(numbers(price, pricer(length), None))
                size = f"{price.memory.total / GIB:.1f} GiB"
                row[2:] = [f"{rate(price):,.0f}", size, f"{price.layout}, {words}"]
            rows.append(row)
    return rows


def here_table(steps: Sequence[LongStep], *, quiet: bool) -> list[list[str]]:
    """Return a table of the measurements on this machine, without step times unless `quiet` is
    True."""
    rows = [["c", "s", "MiB", "by formula", "error", "step"]]
    for step in steps:
        error = step.peak_bytes / step.formula_bytes - 1
        sizes = [f"{step.peak_bytes / MIB:.1f}", f"{step.formula_bytes / MIB:.1f}"]
        time = f"{step.step_s:.2f} s" if quiet else "not quiet"
        rows.append([str(step.context), f"{step.length:,}", *sizes, f"{error:+.1%}", time])
    return rows


def drawn_begins(mean: int, generator: torch.Generator) -> Tensor:
    """Draw documents of exponentially distributed lengths with this mean, one after the other, for
    a sequence of `PACKED_LENGTH` positions. Return, for each position, the first position of its
    document: int64 [s]."""
    lengths = torch.empty(2 * PACKED_LENGTH // mean + 100, dtype=torch.float64)
    lengths = lengths.exponential_(1 / mean, generator=generator).long() + 1
    ends = lengths.cumsum(0)
    assert ends[-1] >= PACKED_LENGTH, "the documents fill the sequence"
    begins = torch.cat((torch.zeros(1, dtype=torch.int64), ends))
    places = torch.arange(PACKED_LENGTH)
    return begins[torch.searchsorted(begins, places, right=True) - 1]


def scores_by_rank(begins: Tensor, context: int) -> Tensor:
    """Return the numbers of causal attention scores, float64 [c, c]: in row r and column k, the
    scores of the queries of context rank r with the keys of rank k. `begins` [s] has the first
    position of each position's document."""
    counts = torch.zeros(context, context, dtype=torch.float64)
    after = torch.arange(len(begins)) + 1
    runs = [list(Positions(rank, context).runs(len(begins))) for rank in range(context)]
    for source, chunks in enumerate(runs):
        for keys in chunks:
            seen = (after.clamp(max=keys.stop) - begins.clamp(min=keys.start)).clamp(min=0)
            for rank, own in enumerate(runs):
                counts[rank, source] += sum(int(seen[run.start : run.stop].sum()) for run in own)
    return counts


def busiest(counts: Tensor) -> dict[str, float]:
    """Return, for each context method, the work of the busiest context rank divided by the mean
    work of the ranks. `counts` is the result of `scores_by_rank`.

    With "ring", each step of the ring takes as long as its busiest rank. So the largest work of a
    rank in a step counts, added up over all steps. With "ulysses", all ranks have equal work,
    because each rank computes all positions for some of the heads.
    """
    context = len(counts)
    ranks = torch.arange(context)
    steps = [counts[ranks, (ranks - step) % context].max() for step in range(context)]
    mean = counts.sum() / context
    return {
        "all_gather": float(counts.sum(1).max() / mean),
        "ring": float(sum(steps) / mean),
        "ulysses": 1.0,
    }


def document_table() -> list[list[str]]:
    """Return a table of the work of the busiest context rank, with a row for each mean length of a
    document: the mean over the drawn sequences, and the largest value."""
    rows = [["mean document", "all_gather", "ring", "ulysses"]]
    for mean in MEAN_DOCUMENTS:
        generator = torch.Generator().manual_seed(1)
        drawn = [
            busiest(scores_by_rank(drawn_begins(mean, generator), PACKED_CONTEXT))
            for _ in range(PACKED_DRAWS)
        ]
        values = [[sample[method] for sample in drawn] for method in rows[0][1:]]
        cells = [f"{sum(each) / len(each):.2f} ({max(each):.2f})" for each in values]
        rows.append([f"{mean:,}", *cells])
    return rows


def _style(axes: Any, title: str, up: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda length, _: f"{length / 1024:,.0f}k")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel("positions of a sequence")
    axes.set_ylabel(up)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.legend(frameon=False, fontsize=8)


def _draw_memory(axes: Any) -> None:
    by_length = {length: memory(length) for length in LENGTHS}
    for name, color in zip(by_length[LENGTHS[0]], COLORS, strict=True):
        sizes = [by_length[length][name] / GIB for length in LENGTHS]
        axes.plot(LENGTHS, sizes, "o-", color=color, label=name, markersize=4)
    capacity = pricer(LENGTHS[0]).capacity_bytes / GIB
    axes.axhline(capacity, color="#777777", linestyle="--", linewidth=1, label="device")
    _style(axes, f"{MODEL}, memory of an H100, predicted", "GiB")


def _draw_rates(axes: Any, found: dict[str, dict[int, Price]]) -> None:
    for (name, prices), color in zip(found.items(), COLORS, strict=False):
        rates = [rate(price) for price in prices.values()]
        axes.plot(
            list(prices), rates, "o-", color=color, label=f"best layout, {name}", markersize=4
        )
    _style(axes, f"{MODEL} on {RANKS} H100, predicted", "tokens/s per rank")


def _draw_here(axes: Any, steps: Sequence[LongStep], key: str, up: str) -> None:
    for context, color in zip(HERE_CONTEXTS, COLORS, strict=True):
        own = [step for step in steps if step.context == context]
        if key == "step_s" and context > (os.cpu_count() or 1):
            continue
        places = [step.length for step in own]
        scale = 1 if key == "step_s" else MIB
        values = [getattr(step, key) / scale for step in own]
        axes.plot(places, values, "o", color=color, label=f"c = {context}, measured")
        if key != "step_s":
            formula = [step.formula_bytes / MIB for step in own]
            axes.plot(places, formula, "-", color=color, linewidth=0.8, label="formula")
    _style(axes, "a small LLaMA on this machine", up)


def draw(found: dict[str, dict[int, Price]], steps: Sequence[LongStep], *, quiet: bool) -> None:
    """Draw the predictions `found` for LLaMA 8B, and the measurements `steps` of this machine, over
    the length of a sequence. Measured times are drawn only if `quiet` is True."""
    from matplotlib.figure import Figure

    down, across = (2, 2) if quiet else (1, 3)
    canvas = Figure(figsize=(4.4 * across, 3.9 * down), dpi=100, layout="constrained")
    panels = list(canvas.subplots(down, across).flat)
    _draw_memory(panels[0])
    _draw_rates(panels[1], found)
    _draw_here(panels[2], steps, "peak_bytes", "MiB of activations on a rank")
    if quiet:
        _draw_here(panels[3], steps, "step_s", "s per step")
    canvas.savefig(PICTURE)


def main() -> None:
    """Measure this machine and predict the layouts, print both tables, and draw the picture. If the
    argument is "documents", print only the work of context ranks with documents."""
    if sys.argv[1:] == ["documents"]:
        print("\n".join(lines(document_table())))
        return
    # measure first, because predictions keep a core busy
    quiet = os.getloadavg()[0] < QUIET_LOAD
    steps = [long_step(context, length) for context in HERE_CONTEXTS for length in HERE_LENGTHS]
    print("\n".join(lines(here_table(steps, quiet=quiet))), end="\n\n")
    found = predictions()
    print("\n".join(lines(prediction_table(found))), end="\n\n")
    draw(found, steps, quiet=quiet)
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
