"""A comparison of several runs in one table and one picture."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptdmpi.plan.show.table import lines
from ptdmpi.report.pictures import validation_points
from ptdmpi.report.run import RecordedRun
from ptdmpi.report.status import binned
from ptdmpi.report.summary import rows_of

# entries of a summary that are left out, because they cannot be compared between runs
OWN = ("attempts", "profiles", "drawn", "validation_losses", "step_shares", "comparison")
NAMES = ("run.name", "run.dir")
POINTS = 200  # maximum number of points in a curve


def table(runs: Sequence[RecordedRun], numbers: Sequence[dict[str, Any]]) -> str:
    """Return a table as text, with a column for each run, and a row for each entry that is in the
    summary of at least one run. `numbers` are the summaries of the runs."""
    columns = []
    for summary in numbers:
        compared = {key: value for key, value in summary.items() if key not in OWN}
        columns.append(dict(rows_of(compared)))
    rows = [["", *labels(runs), ""]]
    for name in dict.fromkeys(name for column in columns for name in column):
        rows.append([name, *(column.get(name, "-") for column in columns), ""])
    return "\n".join(lines(rows))


def differing(runs: Sequence[RecordedRun]) -> dict[str, list[Any]]:
    """Return the settings whose values differ between the runs, as a dict: name of a setting ->
    list of its values, one for each run.

    The value is None for a run that does not have the setting. The keys run.name and run.dir are
    left out.
    """
    flat = [dict(_flat("", run.config)) for run in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    values = {key: [settings.get(key) for settings in flat] for key in keys if key not in NAMES}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def _flat(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each value in nested tables, with its full key. The keys of nested tables are joined by
    dots."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def settings_table(runs: Sequence[RecordedRun], settings: Mapping[str, Sequence[Any]]) -> str:
    """Return a table as text, with a row for each setting that differs and a column for each
    run."""
    rows = [
        [key, *("-" if v is None else str(v) for v in row), ""] for key, row in settings.items()
    ]
    return "\n".join(lines([["setting", *labels(runs), ""], *rows]))


def labels(runs: Sequence[RecordedRun]) -> list[str]:
    """Return a label for each run: the names of the runs, or their directories if two runs have the
    same name."""
    names = [str(run.config["run"]["name"]) for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def picture(runs: Sequence[RecordedRun], path: Path) -> None:
    """Plot the loss of each run over the number of trained tokens. Losses of neighbouring steps are
    averaged, so that each curve has at most POINTS points. Validation losses are shown as dots."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for number, (run, name) in enumerate(zip(runs, labels(runs), strict=True)):
        color = f"C{number % 10}"
        tokens = binned([record["tokens"] for record in run.steps], POINTS)
        losses = binned([record["loss"] for record in run.steps], POINTS)
        axes.plot(tokens, losses, color=color, linewidth=1.2, label=name)
        points = validation_points(run)
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=color, markersize=4)
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token); dots: validation")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend(frameon=False)
    figure.savefig(path)


def largest_gap(runs: Sequence[RecordedRun]) -> dict[str, Any] | None:
    """Return the mean and the maximum of the absolute difference between the losses of two runs,
    over the steps that both runs have recorded.

    Return None if there are not exactly two runs, or if they have no step in common.
    """
    if len(runs) != 2:
        return None
    first = {record["step"]: record["loss"] for record in runs[0].steps}
    second = {record["step"]: record["loss"] for record in runs[1].steps}
    common = sorted(first.keys() & second.keys())
    if not common:
        return None
    gaps = {step: abs(first[step] - second[step]) for step in common}
    worst = max(common, key=lambda step: gaps[step])
    mean = statistics.fmean(gaps.values())
    return {"steps": len(common), "mean": mean, "largest": gaps[worst], "at_step": worst}
