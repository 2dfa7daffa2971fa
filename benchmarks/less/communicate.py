"""`python -m benchmarks.less.communicate [PART ...]` (`make communicate-less`): measurements of
communication-efficient methods. The parts are named `measured`, `transient` and `link`; the default
is all parts.

The tables are written between marks in docs/explanation/less-communication.md, and the pictures
into docs/pictures. The results of each part are written as soon as the part is done. On 2 cores all
parts take about twenty minutes. Most of this time is needed for training runs with more ranks than
cores.
"""

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.launch import ROOT, answer
from benchmarks.less import theory, transient
from benchmarks.less.cases import ALL, CHOCO, COMPRESSED, GOSSIP, LOCAL, PLAIN, PSGD, MethodCase
from benchmarks.marks import put, table

PAGE = ROOT / "docs/explanation/less-communication.md"
PICTURES = ROOT / "docs/pictures"
DATA = ROOT / "runs/less-data"
STEPS = 96
SOME = [PSGD, GOSSIP[0], LOCAL[1], GOSSIP[2], LOCAL[3], COMPRESSED[1], CHOCO[1]]
TRAINED: Mapping[int, Sequence[MethodCase]] = {
    4: [*ALL, *PLAIN],
    # Training on more ranks than cores takes long, so only some methods are trained on 8 and 16
    # ranks. Most of these methods that use top-k have a compression ratio of 1 %.
    8: [*SOME, *PLAIN[:6]],
    16: [*SOME[:3], PLAIN[0], PLAIN[2], PLAIN[5]],
}
# The size of a label in the picture, as a fraction of the range of all points.
LABEL_WIDTH, LABEL_HEIGHT = 0.05, 0.035
ROUNDS = {4: 3, 8: 2}  # number of nodes -> number of rounds in the part "link"
Rows = list[dict[str, Any]]


def prepare(data: Path) -> None:
    """Make shards from the demo's corpus in the folder `data`, unless the shards exist already."""
    if (data / "valid").is_dir():
        return
    data.mkdir(parents=True, exist_ok=True)
    corpus = data / "corpus.jsonl"
    tokenizer = data / "tokenizer.json"
    tool = [str(Path(sys.executable).parent / "ptdmpi-data")]
    size = ["--vocab-size", "1000"]
    known = ["--tokenizer", str(tokenizer), "--force"]
    valid = ["--valid-output", str(data / "valid"), "--valid-fraction", "0.01"]
    for command in (
        [sys.executable, str(ROOT / "jobs/demo_corpus.py"), str(corpus)],
        [*tool, "train-tokenizer", str(corpus), *size, "--output", str(tokenizer)],
        [*tool, "tokenize", str(corpus), *known, "--output", str(data / "train"), *valid],
    ):
        subprocess.run(command, check=True)


def trained(data: Path, ranks: int, cases: Sequence[MethodCase], steps: int) -> Rows:
    """Run `benchmarks.less.rank` on `ranks` ranks for the given cases, and return the results."""
    names = ";".join(case.name for case in cases)
    text = answer(ranks, ["-m", "benchmarks.less.rank", str(data), str(steps), names])
    rows: Rows = json.loads(text[text.index("[{") :])
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from table(head, rows)
    yield ""


def theory_lines(lengths: theory.Lengths) -> Iterator[str]:
    """Yield the lines of the tables of speed-up, topologies, local steps and compression for the
    quadratic problem, and draw the picture."""
    yield from _speed_up_lines(lengths)
    curves = theory.topologies(lengths)
    yield from _topology_lines(curves, lengths.topologies)
    yield "**Local steps**, n = 8, constant rate: final error of the averages:"
    yield ""
    by_steps = theory.local(lengths)
    head = ["K", *map(str, by_steps)]
    yield from _table(head, [["error", *(f"{error:.4f}" for error in by_steps.values())]])
    errors = theory.compressed(lengths)
    yield from _feedback_lines(errors)
    _picture_theory(curves, errors)


def _speed_up_lines(lengths: theory.Lengths) -> Iterator[str]:
    yield "**Speed-up.** Final error |x_i - x*|^2 at a constant rate, by the number of workers:"
    yield ""
    rows = [
        [name, *(f"{errors[n]:.3f}" for n in theory.SIZES), f"{errors[4] / errors[16]:.1f}"]
        for name, errors in theory.speed_up(lengths).items()
    ]
    yield from _table(
        ["method", *(f"n = {n}" for n in theory.SIZES), "error for n = 4 / n = 16"], rows
    )


def _topology_lines(curves: Mapping[str, theory.TopologyCurve], steps: int) -> Iterator[str]:
    yield "**Topologies**, n = 16, falling rate, a different minimum for each worker:"
    yield ""
    rows = [
        [name, f"{curve.gap:.3f}", str(curve.transient or f"> {steps}")]
        + [f"{curve.ratio[at - 1]:.2f}" for at in _shown_places(len(curve.ratio))]
        for name, curve in curves.items()
    ]
    at = [f"error / PSGD's error, step {100 * n}" for n in _shown_places(len(curves["ring"].ratio))]
    yield from _table(["topology", "spectral gap", "transient steps", *at], rows)


def _shown_places(count: int) -> tuple[int, ...]:
    return tuple(max(1, count * part // 100) for part in (5, 25, 100))


def _feedback_lines(errors: Mapping[tuple[str, float], theory.Array]) -> Iterator[str]:
    yield "**Top-k**, n = 8, 200 dimensions, falling rate: error at the end (and half-way):"
    yield ""
    plain = _last_and_middle(errors["PSGD", 1.0])
    rows = [["PSGD", plain, plain]]
    for name in theory.FEEDBACK:
        rows.append([name, *(_last_and_middle(errors[name, ratio]) for ratio in theory.RATIOS)])
    yield from _table(["error feedback", *(f"top {ratio:.0%}" for ratio in theory.RATIOS)], rows)


def _last_and_middle(errors: theory.Array) -> str:
    return f"{errors[-1]:.4f} ({errors[len(errors) // 2 - 1]:.4f})"


def transient_lines(steps: int) -> Iterator[str]:
    """Yield the lines of a table of transient iterations for each topology, for data that is equal
    on all workers and for data that differs between workers."""
    by_size = {size: transient.rows(size, steps) for size in (8, 16)}
    kinds = ("gap", "equal", "different")
    head = [f"{kind}, n = {size}" for size in by_size for kind in kinds]
    rows = []
    for last in by_size[16]:
        cells = []
        for of_size in by_size.values():
            (row,) = (row for row in of_size if row.topology == last.topology)
            cells += [f"{row.gap:.3f}", *map(_count_of(steps), (row.alike, row.different))]
        rows.append([f"`{last.topology}`", *cells])
    yield from table(["", *head], rows)


def _count_of(steps: int) -> Callable[[int | None], str]:
    """Return a function that formats a number of steps as text. The function formats None as a
    number above `steps`."""
    return lambda count: f"> {steps:,}" if count is None else f"{count:,}"


def link_lines(nodes: int, rounds: int) -> Iterator[str]:
    """Run `benchmarks.network.neighbours`, and yield the lines of its table, or the reason for its
    failure."""
    words = ["benchmarks.network.neighbours", "--nodes", str(nodes), "--rounds", str(rounds)]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    head, _, rows = done.stdout.partition("\n")
    if rows:
        yield from (f"{head}, {rounds} rounds:", "", rows)
    else:
        yield from (done.stderr.strip()[-200:], "")


def loss_lines(by_ranks: Mapping[int, Rows], cases: Sequence[MethodCase]) -> Iterator[str]:
    """Yield the lines of a table of the validation losses of some cases, for each number of
    ranks."""
    losses = [{row["name"]: row for row in rows} for rows in by_ranks.values()]
    rows = []
    for case in cases:
        cells = [_loss_cell(by_name.get(case.name)) for by_name in losses]
        rows.append([case.name.removesuffix(", SGD"), *cells])
    yield from _table(["method", *(f"n = {n}" for n in by_ranks)], rows)


def _loss_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    apart = f" ({row['apart']:.2g})" if row["apart"] else ""
    return f"{row['validation_loss']:.3f}{apart}"


def trained_lines(by_ranks: Mapping[int, Rows], steps: int) -> Iterator[str]:
    """Yield the lines of the tables for the small GPT: validation losses and sent bytes of each
    method."""
    first = by_ranks[min(by_ranks)]
    size = f"{first[0]['parameters']:,} parameters, {steps} steps"
    yield f"**A small GPT** of {size} of AdamW: validation loss, and distance between replicas:"
    yield ""
    yield from loss_lines(by_ranks, ALL)
    rate = PLAIN[0].optimizer["learning_rate"]
    yield f"**The same with SGD**, {steps} steps at a rate of {rate}, no momentum, no clipping:"
    yield ""
    yield from loss_lines(by_ranks, PLAIN)
    yield "**Bytes** that a rank sends in a step (n = 4, mean over ranks), counted and by formula:"
    yield ""
    plain = first[0]["sent_bytes"]
    rows = [
        [
            row["name"],
            f"{row['sent_bytes'] / 1e3:,.1f}",
            f"{row['foreseen_bytes'] / 1e3:,.1f}",
            f"{plain / row['sent_bytes']:.1f}",
        ]
        for row in first[: len(ALL)]
    ]
    yield from _table(
        ["method", "kB counted", "kB by formula", "kB of all_reduce, divided by kB of the method"],
        rows,
    )


def machine() -> str:
    """Return a line of text about this machine: cores, processor and version of Python."""
    text = Path("/proc/cpuinfo").read_text()
    name = next(line.split(":")[1] for line in text.splitlines() if "model name" in line)
    return f"{os.cpu_count()} cores of{name}, Python {platform.python_version()}"


def _picture_theory(
    curves: Mapping[str, theory.TopologyCurve], errors: Mapping[tuple[str, float], theory.Array]
) -> None:
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name, curve in curves.items():
        left.plot([100 * (k + 1) for k in range(len(curve.ratio))], curve.ratio, label=name)
    left.set(xscale="log", yscale="log", xlabel="step", ylabel="error over PSGD's")
    for (name, ratio), values in errors.items():
        if ratio != 0.05:
            right.plot(values, label=name if ratio == 1.0 else f"{name}, 1 %")
    right.set(yscale="log", xlabel="recorded step", ylabel="error")
    for axes in (left, right):
        axes.legend(fontsize=7)
    figure.savefig(PICTURES / "less-quadratic.png", dpi=110)
    plt.close(figure)


def label_groups(points: Sequence[tuple[float, float]]) -> list[list[int]]:
    """Return groups of indices of `points` (bytes, loss). The points of a group share one label in
    the picture.

    The labels of two points overlap if the points are close in both coordinates: in the logarithm
    of the bytes and in the loss, relative to the range of all points. A point belongs to a group if
    the point's label would overlap with the label of the group's first point.
    """
    places = [(math.log10(sent), loss) for sent, loss in points]
    spans = [max(values) - min(values) or 1.0 for values in zip(*places, strict=True)]
    groups: list[list[int]] = []
    for index, place in enumerate(places):
        for group in groups:
            first = places[group[0]]
            shares = [abs(a - b) / span for a, b, span in zip(place, first, spans, strict=True)]
            if shares[0] < LABEL_WIDTH and shares[1] < LABEL_HEIGHT:
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def picture_trained(rows: Rows) -> None:
    """Plot two panels: the validation loss with AdamW over the bytes that were sent, and the
    training losses with SGD over the steps."""
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.4), layout="constrained")
    points = [(row["sent_bytes"], row["validation_loss"]) for row in rows[: len(ALL)]]
    for number, (row, point) in enumerate(zip(rows, points, strict=False), 1):
        left.plot(*point, ".", color="tab:blue")
        left.plot([], [], " ", label=f"{number}  {row['name']}")
    for places in label_groups(points):
        text = ", ".join(str(place + 1) for place in places)
        # put the label to the right of all points of the group, so that it hides none of them
        corner = tuple(max(values) for values in zip(*(points[i] for i in places), strict=True))
        left.annotate(text, corner, (4, 2), textcoords="offset points", fontsize=7)
    left.margins(x=0.1)  # room for the label of the last point
    left.set(xscale="log", xlabel="bytes a rank sends in a step", ylabel="validation loss, AdamW")
    figure.legend(loc="outside lower center", ncols=5, fontsize=7, handlelength=0, frameon=False)
    for row in rows[len(ALL) :]:
        if "5%" not in row["name"]:
            right.plot(row["losses"], label=row["name"], lw=0.9)
    right.set(xlabel="step", ylabel="loss")
    right.legend(fontsize=7)
    figure.savefig(PICTURES / "less-gpt.png", dpi=110)
    plt.close(figure)


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def measured() -> None:
    """Do the part "measured": measure the methods on the quadratic problem and on the small GPT."""
    prepare(DATA)
    by_ranks: dict[int, Rows] = {}
    for ranks, cases in TRAINED.items():
        print(f"{len(cases)} trainings on {ranks} ranks", flush=True)
        by_ranks[ranks] = trained(DATA, ranks, cases, STEPS)
    lines = [f"`make communicate-less`, on {machine()}.", "", *theory_lines(theory.Lengths())]
    lines += ["![errors on the quadratic problem](../pictures/less-quadratic.png)", ""]
    lines += trained_lines(by_ranks, STEPS)
    picture_trained(by_ranks[min(by_ranks)])
    put(PAGE, "measured", [*lines, "![losses of a small GPT](../pictures/less-gpt.png)"])


def slow_link() -> None:
    """Do the part "link": measure training over a slow link, for each number of nodes in ROUNDS."""
    lines = []
    for nodes, rounds in ROUNDS.items():
        lines += link_lines(nodes, rounds)
    put(PAGE, "slow link", lines)


PARTS: Mapping[str, Callable[[], None]] = {
    "measured": measured,
    "transient": lambda: put(PAGE, "transient", list(transient_lines(transient.STEPS))),
    "link": slow_link,
}


def main() -> None:
    """Run the measurements that the command line names."""
    wanted = sys.argv[1:] or list(PARTS)
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        print(f"communicate: no part {unknown[0]}: legal are {', '.join(PARTS)}", file=sys.stderr)
        sys.exit(2)
    for name in wanted:
        PARTS[name]()


if __name__ == "__main__":
    main()
