"""Several runs in one table and one picture."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptdmpi.plan.show.table import lines
from ptdmpi.report import Run, rows_of
from ptdmpi.report.status import binned

# what makes up a run rather than what comes out of it, and so is no column of a comparison
OWN = ("attempts", "profiles", "drawn", "validation_losses", "step_shares", "comparison")
NAMES = ("run.name", "run.dir")
POINTS = 200  # of each curve


def table(runs: Sequence[Run], numbers: Sequence[dict[str, Any]]) -> str:
    """A column for each run, a row for each number that any of them has."""
    columns = [dict(rows_of({k: v for k, v in one.items() if k not in OWN})) for one in numbers]
    names = list(dict.fromkeys(name for column in columns for name in column))
    head = ["", *labels(runs), ""]
    return "\n".join(
        lines([head, *([name, *(c.get(name, "-") for c in columns), ""] for name in names)])
    )


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The settings that are not the same in all runs, one value for each of them; None where a run
    has no such key. Where a run is and what it is called is not told."""
    flat = [dict(_flat("", run.config)) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    values = {key: [one.get(key) for one in flat] for key in keys if key not in NAMES}
    return {key: row for key, row in values.items() if any(one != row[0] for one in row)}


def _flat(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def settings_table(runs: Sequence[Run], settings: Mapping[str, Sequence[Any]]) -> str:
    """A row for each setting that differs, a column for each run."""
    rows = [
        [key, *("-" if v is None else str(v) for v in row), ""] for key, row in settings.items()
    ]
    return "\n".join(lines([["setting", *labels(runs), ""], *rows]))


def labels(runs: Sequence[Run]) -> list[str]:
    """Their names, or where two are alike, their directories."""
    names = [str(run.config["run"]["name"]) for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def picture(runs: Sequence[Run], path: Path) -> None:
    """Loss of each run over tokens, smoothed to POINTS points, and its validations as dots."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for number, (run, name) in enumerate(zip(runs, labels(runs), strict=True)):
        color = f"C{number % 10}"
        tokens = binned([record["tokens"] for record in run.steps], POINTS)
        losses = binned([record["loss"] for record in run.steps], POINTS)
        axes.plot(tokens, losses, color=color, linewidth=1.2, label=name)
        at = {record["step"]: record["tokens"] for record in run.steps}
        points = [(at[r["step"]], r["validation_loss"]) for r in run.validations if r["step"] in at]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=color, markersize=4)
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token); dots: validation")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend(frameon=False)
    figure.savefig(path)


def largest_gap(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Where two runs of the same steps differ most in loss; None unless there are two."""
    if len(runs) != 2:
        return None
    first, second = ({r["step"]: r["loss"] for r in run.steps} for run in runs)
    common = sorted(first.keys() & second.keys())
    if not common:
        return None
    gaps = {step: abs(first[step] - second[step]) for step in common}
    worst = max(common, key=lambda step: gaps[step])
    mean = statistics.fmean(gaps.values())
    return {"steps": len(common), "mean": mean, "largest": gaps[worst], "at_step": worst}
