"""`python -m benchmarks.network.page` writes the tables and pictures in
docs/explanation/ptd-vs-zero3.md.

The simulated tables are predictions of the planner. The measured tables show the last results of
`benchmarks.network.ptd_zero3`.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.launch import ROOT
from benchmarks.marks import replaced, table
from benchmarks.network.case import PTD_P, ZERO_3, Compared
from benchmarks.network.nodes import NodeLink
from benchmarks.planning.rows import PublishedRun, published
from benchmarks.planning.validate_plan import predicted
from benchmarks.turns import spread
from ptdmpi.base.disk import write_whole

PAGE = ROOT / "docs/explanation/ptd-vs-zero3.md"
PICTURES = ROOT / "docs/pictures"
RESULTS = Path(__file__).parent / "results/ptd_zero3.json"
COLORS = {PTD_P: "#1f4e8c", ZERO_3: "#c8511b"}


def table_2() -> dict[str, list[tuple[PublishedRun, float]]]:
    """Return the published runs of Table 2 of Narayanan et al. 2021 with PTD-P and with ZeRO-3, in
    the order of the table, each with the predicted TFLOP/s per GPU."""
    return {
        way: [
            (row, predicted(row).hardware_tflops_per_rank)
            for row in published()
            if row.dataset == f"Table 2, {way}"
        ]
        for way in (PTD_P, ZERO_3)
    }


def simulated_lines() -> Iterator[str]:
    """Yield the lines of Table 2 of Narayanan et al. 2021 in Markdown: published and simulated
    TFLOP/s per GPU, and the ratios of PTD-P to ZeRO-3."""
    yield (
        "| model | GPUs | batch | ZeRO-3: b | published | simulated | PTD-P: t, p, d | published "
        "| simulated | PTD-P / ZeRO-3 published | simulated |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    ways = table_2()
    for (ptd, ptd_guess), (zero, zero_guess) in zip(ways[PTD_P], ways[ZERO_3], strict=True):
        sizes = ptd.layout
        yield (
            f"| {zero.name.split()[1]} | {_both(zero.layout.ranks, sizes.ranks)} "
            f"| {_both(zero.batch, ptd.batch)} "
            f"| {zero.layout.micro_size} | {zero.value:.0f} | {zero_guess:.0f} "
            f"| {sizes.tensor}, {sizes.pipeline}, {sizes.data} | {ptd.value:.0f} | {ptd_guess:.0f} "
            f"| {ptd.value / zero.value:.2f} | {ptd_guess / zero_guess:.2f} |"
        )


def _both(zero: int, ptd: int) -> str:
    return f"{zero}" if zero == ptd else f"{zero}; {ptd}"


def measured_lines(results: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the measured tables in Markdown. Each ratio compares two rates of the same
    round."""
    case = results["case"]
    here = results["machine"]
    yield (
        f"GPT l={case['layers']} h={case['hidden']} a={case['heads']} s={case['seq_length']} "
        f"V={case['vocab_size']}, fp32, on {here['cores']} cores ({here['cpu']}), "
        f"{case['rounds']} rounds, {results['measured'][:10]}:"
    )
    yield from ("", "![tokens/s over the batch](../pictures/ptd-vs-zero3.png)", "")
    yield "| ranks | link | batch | PTD-P tokens/s | ZeRO-3 tokens/s | PTD-P / ZeRO-3 |"
    yield "|---|---|---|---|---|---|"
    for run in results["runs"]:
        for row in run["rows"]:
            ptd = row["ways"][PTD_P]["tokens_per_s"]
            zero = row["ways"][ZERO_3]["tokens_per_s"]
            ratios = [rate / other for rate, other in zip(ptd, zero, strict=True)]
            yield (
                f"| {run['ranks']} | {NodeLink(**run['link'])} | {row['batch']} | {_rates(ptd)} "
                f"| {_rates(zero)} | {spread(ratios)} |"
            )
    formula = Compared(**case).zero_bytes / 1e6
    yield ""
    yield "The next table shows the time or the rate of one MPI message across the link, by its"
    yield "size, and the MB that cross the link in a step, in both directions together, for the"
    yield f"smallest and the largest batch (3 psi elements are {formula:.1f} MB):"
    yield ""
    sizes = list(results["runs"][0]["one_way_s"])
    rows = []
    for run in results["runs"]:
        times = [_rate(int(size), run["one_way_s"][size]) for size in sizes]
        sent = [_range(run["rows"], way) for way in (PTD_P, ZERO_3)]
        rows.append([str(run["ranks"]), str(NodeLink(**run["link"])), *times, *sent])
    head = ["ranks", "link", *(_size(int(size)) for size in sizes), PTD_P, ZERO_3]
    yield from table(head, rows)


def _rates(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def _size(size: int) -> str:
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if size >> shift:
            return f"{size >> shift} {unit}"
    return f"{size} bytes"


def _rate(size: int, seconds: float) -> str:
    """Return the time of a small message, or the rate of a large message, as text."""
    if size < 1 << 20:
        return f"{seconds * 1e6:.0f} us"
    return f"{size * 8e-6 / seconds:.0f} Mbit/s"


def _range(rows: Sequence[dict[str, Any]], way: str) -> str:
    """Return a text with the megabytes that cross the link in a step with the layout `way`, for the
    smallest and for the largest batch."""
    sent = [row["ways"][way]["sent_bytes"] / 1e6 for row in rows]
    return f"{sent[0]:.1f} to {sent[-1]:.1f}"


def draw_simulated(path: Path) -> None:
    """Draw Figure 10 of Narayanan et al. 2021: TFLOP/s per GPU over the number of GPUs. Published
    values are circles, and simulated values are crosses on a line."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(7.6, 3.2), dpi=110, layout="constrained")
    models = ("174.6B", "529.6B")
    panels = canvas.subplots(1, 2, sharey=True)
    for axes, model in zip(panels, models, strict=True):
        for way, rows in table_2().items():
            own = [pair for pair in rows if pair[0].name.split()[1] == model]
            at = [row.layout.ranks for row, _ in own]
            guesses = [guess for _, guess in own]
            color = COLORS[way]
            points = [row.value for row, _ in own]
            axes.plot(at, points, "o", color=color, label=f"{way}, published")
            axes.plot(at, guesses, "x-", color=color, linewidth=0.8, label=f"{way}, simulated")
        axes.set_title(f"GPT of {model}, Selene", loc="left", fontsize=10)
    # set the limits after all panels are plotted, because the panels share a scale
    for axes in panels:
        _finish(axes, "GPUs", "TFLOP/s per GPU")
    canvas.savefig(path)


def draw_measured(results: dict[str, Any], path: Path) -> None:
    """Plot tokens/s over the batch size, with a panel for each number of ranks. Error bars go from
    the slowest to the fastest round."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(7.6, 3.4), dpi=110, layout="constrained")
    counts = sorted({run["ranks"] for run in results["runs"]})
    for axes, ranks in zip(canvas.subplots(1, len(counts), squeeze=False)[0], counts, strict=True):
        for run in (run for run in results["runs"] if run["ranks"] == ranks):
            link = NodeLink(**run["link"])
            for way, color in COLORS.items():
                rates = [row["ways"][way]["tokens_per_s"] for row in run["rows"]]
                middle = [statistics.median(values) for values in rates]
                below = [m - min(values) for m, values in zip(middle, rates, strict=True)]
                above = [max(values) - m for m, values in zip(middle, rates, strict=True)]
                axes.errorbar(
                    [row["batch"] for row in run["rows"]],
                    middle,
                    yerr=[below, above],
                    fmt="o-" if link.rate_mbit else "x--",
                    color=color,
                    linewidth=1.0,
                    capsize=2,
                    label=f"{way}, {link}",
                )
        axes.set_xscale("log", base=2)
        batches = results["case"]["batches"]
        axes.set_xticks(batches, map(str, batches))
        axes.set_title(f"{ranks} ranks on two nodes", loc="left", fontsize=10)
        _finish(axes, "batch (sequences)", "tokens/s")
    canvas.savefig(path)


def _finish(axes: Any, across: str, up: str) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.legend(frameon=False, fontsize=7)


def main() -> None:
    """Write the tables of the page, and draw its pictures."""
    simulated = ["", *simulated_lines(), ""]
    text = replaced(PAGE.read_text(encoding="utf-8"), "simulated", simulated)
    draw_simulated(PICTURES / "table-2.png")
    if RESULTS.exists():
        results = json.loads(RESULTS.read_text(encoding="utf-8"))
        text = replaced(text, "measured", ["", *measured_lines(results), ""])
        draw_measured(results, PICTURES / "ptd-vs-zero3.png")
    write_whole(PAGE, text)
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
