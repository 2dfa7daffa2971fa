"""`python -m benchmarks.less.communicate [PART ...]` (`make communicate-less`): less communication,
measured. Parts: measured, transient, link; without a name all.

Writes the tables between the marks of docs/explanation/less-communication.md, and pictures; each
part as it is over. On 2 cores all take some twenty minutes, most of them for the trainings with
more ranks than cores.
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
from ptdmpi.base.disk import write_whole

PAGE, PICTURES = ROOT / "docs/explanation/less-communication.md", ROOT / "docs/pictures"
DATA = ROOT / "runs/less-data"
STEPS = 96
SOME = [PSGD, GOSSIP[0], LOCAL[1], GOSSIP[2], LOCAL[3], COMPRESSED[1], CHOCO[1]]
TRAINED: Mapping[int, Sequence[MethodCase]] = {
    4: [*ALL, *PLAIN],
    # with ranks beyond the cores the time goes up with their number; 1 % tells the order
    8: [*SOME, *PLAIN[:6]],
    16: [*SOME[:3], PLAIN[0], PLAIN[2], PLAIN[5]],
}
ROUNDS = {4: 3, 8: 2}  # nodes -> rounds
Rows = list[dict[str, Any]]


def prepare(data: Path) -> None:
    """The demo's corpus as shards of bytes' pairs, where it is not there yet."""
    if (data / "valid").is_dir():
        return
    data.mkdir(parents=True, exist_ok=True)
    corpus, tokenizer = data / "corpus.jsonl", data / "tokenizer.json"
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
    """What `benchmarks.less.rank` tells of these cases."""
    names = ";".join(case.name for case in cases)
    text = answer(ranks, ["-m", "benchmarks.less.rank", str(data), str(steps), names])
    return json.loads(text[text.index("[{") :])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Markdown."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def theory_lines(lengths: theory.Lengths) -> Iterator[str]:
    """Speed-up, topologies, local steps and compression on the quadratic problem."""
    yield "**Speed-up.** Error |x_i - x*|^2 that a constant rate ends at, by the number of workers:"
    yield ""
    rows = [
        [name, *(f"{one[n]:.3f}" for n in theory.SIZES), f"{one[4] / one[16]:.1f}"]
        for name, one in theory.speed_up(lengths).items()
    ]
    yield from table(["method", *(f"n = {n}" for n in theory.SIZES), "n = 4 over n = 16"], rows)
    curves = theory.topologies(lengths)
    yield "**Topologies**, n = 16, falling rate, workers with minima of their own:"
    yield ""
    rows = [
        [name, f"{one.gap:.3f}", str(one.transient or f"> {lengths.topologies}")]
        + [f"{one.ratio[at - 1]:.2f}" for at in _some(len(one.ratio))]
        for name, one in curves.items()
    ]
    at = [f"error over PSGD's at {100 * n}" for n in _some(len(curves["ring"].ratio))]
    yield from table(["topology", "spectral gap", "transient steps", *at], rows)
    yield "**Local steps**, n = 8, constant rate: error at averages once it falls no more:"
    yield ""
    found = theory.local(lengths)
    head = ["K", *map(str, found)]
    yield from table(head, [["error", *(f"{one:.4f}" for one in found.values())]])
    yield "**Top-k**, n = 8, 200 dimensions, falling rate: error at the end (and half-way):"
    yield ""
    errors = theory.compressed(lengths)
    rows = [["PSGD", *[_end(errors["PSGD", 1.0])] * 2]]
    rows += [
        [name, *(_end(errors[name, ratio]) for ratio in theory.RATIOS)] for name in theory.FEEDBACK
    ]
    yield from table(["feedback", *(f"{ratio:.0%}" for ratio in theory.RATIOS)], rows)
    _picture_theory(curves, errors)


def _some(count: int) -> tuple[int, ...]:
    return tuple(max(1, count * part // 100) for part in (5, 25, 100))


def _end(errors) -> str:
    return f"{errors[-1]:.4f} ({errors[len(errors) // 2 - 1]:.4f})"


def transient_lines(steps: int) -> Iterator[str]:
    """Transient iterations by topology, of data that are alike and of data that differ."""
    found = {size: transient.rows(size, steps) for size in (8, 16)}
    by_name = {size: {row[0]: row for row in rows} for size, rows in found.items()}
    head = [f"{one}, n = {size}" for size in found for one in ("gap", "equal", "different")]
    rows = []
    for name, *_ in found[16]:
        cells = []
        for size in found:
            _, gap, *late = by_name[size][name]
            cells += [f"{gap:.3f}", *(f"{n:,}" if n is not None else f"> {steps:,}" for n in late)]
        rows.append([f"`{name}`", *cells])
    yield from table(["", *head], rows)


def link_lines(nodes: int, rounds: int) -> Iterator[str]:
    """What `benchmarks.network.neighbours` prints, or why it cannot."""
    words = ["benchmarks.network.neighbours", "--nodes", str(nodes), "--rounds", str(rounds)]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    head, _, rows = done.stdout.partition("\n")
    yield from (f"{head}, {rounds} rounds:", "", rows) if rows else (done.stderr.strip()[-200:], "")


def loss_lines(found: Mapping[int, Rows], cases: Sequence[MethodCase]) -> Iterator[str]:
    """Validation losses of some cases by the number of ranks."""
    losses = {ranks: {row["name"]: row for row in rows} for ranks, rows in found.items()}
    rows = []
    for case in cases:
        cells = []
        for by_name in losses.values():
            row = by_name.get(case.name)
            apart = f" ({row['apart']:.2g})" if row and row["apart"] else ""
            cells.append(f"{row['validation_loss']:.3f}{apart}" if row else "")
        rows.append([case.name.removesuffix(", SGD"), *cells])
    yield from table(["method", *(f"n = {n}" for n in found)], rows)


def trained_lines(found: Mapping[int, Rows], steps: int) -> Iterator[str]:
    """The GPT by each method: validation loss and bytes."""
    first = found[min(found)]
    told = f"{first[0]['parameters']:,} parameters, {steps} steps"
    yield f"**A small GPT** of {told} of AdamW: validation loss, and how far replicas were apart:"
    yield ""
    yield from loss_lines(found, ALL)
    rate = PLAIN[0].optimizer["learning_rate"]
    yield f"**The same with SGD**, {steps} steps at a rate of {rate}, no momentum, no clipping:"
    yield ""
    yield from loss_lines(found, PLAIN)
    yield "**Bytes** of a step, n = 4, mean over ranks, counted as they leave, and by formula:"
    yield ""
    plain = first[0]["sent_bytes"]
    rows = [
        [
            one["name"],
            f"{one['sent_bytes'] / 1e3:,.1f}",
            f"{one['foreseen_bytes'] / 1e3:,.1f}",
            f"{plain / one['sent_bytes']:.1f}",
        ]
        for one in first[: len(ALL)]
    ]
    yield from table(["method", "kB counted", "kB by formula", "all_reduce's over it"], rows)


def machine() -> str:
    """What it was measured on."""
    text = Path("/proc/cpuinfo").read_text()
    name = next(line.split(":")[1] for line in text.splitlines() if "model name" in line)
    return f"{os.cpu_count()} cores of{name}, Python {platform.python_version()}"


def _picture_theory(curves, errors) -> None:
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name, one in curves.items():
        left.plot([100 * (k + 1) for k in range(len(one.ratio))], one.ratio, label=name)
    left.set(xscale="log", yscale="log", xlabel="step", ylabel="error over PSGD's")
    for (name, ratio), one in errors.items():
        if ratio != 0.05:
            right.plot(one, label=name if ratio == 1.0 else f"{name}, 1 %")
    right.set(yscale="log", xlabel="recorded step", ylabel="error")
    for axes in (left, right):
        axes.legend(fontsize=7)
    figure.savefig(PICTURES / "less-quadratic.png", dpi=110)
    plt.close(figure)


def picture_trained(rows: Rows) -> None:
    """Validation loss over what was sent; losses over steps, of AdamW and of SGD."""
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.4), layout="constrained")
    together: dict[tuple[float, float], list[str]] = {}
    for number, row in enumerate(rows[: len(ALL)], 1):
        at = row["sent_bytes"], row["validation_loss"]
        left.plot(*at, ".", color="tab:blue")
        left.plot([], [], " ", label=f"{number}  {row['name']}")
        near = round(math.log10(at[0]), 1), round(at[1], 2)  # their numbers would be one blot
        together.setdefault(near, [f"{at[0]}", f"{at[1]}"]).append(str(number))
    for x, y, *numbers in together.values():
        where = float(x), float(y)
        left.annotate(", ".join(numbers), where, (4, 2), textcoords="offset points", fontsize=7)
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


def put(name: str, lines: Sequence[str]) -> None:
    """`lines` between the marks `name` of the page."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    page, text = PAGE.read_text(encoding="utf-8"), "\n".join(lines)
    head, rest = page.split(begin, 1)
    write_whole(PAGE, head + begin + text + end + rest.split(end, 1)[1])
    print(text, flush=True)


def measured() -> None:
    """The quadratic problem and the GPT."""
    prepare(DATA)
    found: dict[int, Rows] = {}
    for ranks, cases in TRAINED.items():
        print(f"{len(cases)} trainings on {ranks} ranks", flush=True)
        found[ranks] = trained(DATA, ranks, cases, STEPS)
    lines = [f"`make communicate-less`, on {machine()}.", "", *theory_lines(theory.Lengths())]
    lines += ["![errors on the quadratic problem](../pictures/less-quadratic.png)", ""]
    lines += trained_lines(found, STEPS)
    picture_trained(found[min(found)])
    put("measured", [*lines, "![losses of a small GPT](../pictures/less-gpt.png)", ""])


PARTS: Mapping[str, Callable[[], None]] = {
    "measured": measured,
    "transient": lambda: put("transient", list(transient_lines(60_000))),
    "link": lambda: put("slow link", [line for one in ROUNDS.items() for line in link_lines(*one)]),
}


def main() -> None:
    wanted = sys.argv[1:] or list(PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        print(f"communicate: no part {unknown[0]}: legal are {', '.join(PARTS)}", file=sys.stderr)
        sys.exit(2)
    for name in wanted:
        PARTS[name]()


if __name__ == "__main__":
    main()
