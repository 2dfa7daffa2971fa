"""The summary of a run: the numbers that `ptdmpi report` shows in its table and in its --json
output."""

from collections.abc import Callable, Mapping
from typing import Any

from ptdmpi.base.words import file_size
from ptdmpi.config import InputError
from ptdmpi.config.zero import covers_state
from ptdmpi.report import noise, traffic, trained
from ptdmpi.report.run import RecordedRun
from ptdmpi.report.steps import PARTS, compute_window, planned, shares
from ptdmpi.sinks.record import task_score
from ptdmpi.train.records.keys import RECORD_KEYS, ReportRow, Unit

Rows = list[tuple[str, str]]

# result of `_layout` for a record without a layout, such as the record of a validation
NO_LAYOUT = (None, None)


def summary(run: RecordedRun) -> dict[str, Any]:
    """Return the numbers of the report as a dict, name -> value, in the order of the report's
    table. Raise InputError if no step is recorded.

    `RECORD_KEYS` defines, for each key of the records, the rows that are computed from the values
    of this key.
    """
    if not run.steps:
        if run.problems:
            raise InputError(
                f"{run.path}: metrics.jsonl contains no readable step; {'; '.join(run.problems)}"
            )
        raise InputError(f"{run.path}: metrics.jsonl contains no step yet")
    numbers: dict[str, Any] = {}
    for key, declared in RECORD_KEYS.items():
        for row in declared.rows:
            if values := _values(run, key, row):
                numbers[row.name] = row.choose(values)
        if declared.within and declared.within not in numbers:
            value = _WITHIN[declared.within](run)
            if value:
                numbers[declared.within] = value
    undeclared: dict[str, Any] = {}
    for record in run.records:
        undeclared |= {key: record[key] for key in record.keys() - RECORD_KEYS.keys()}
    if undeclared:
        numbers["undeclared"] = dict(sorted(undeclared.items()))
    return numbers | _of_files(run)


def _values(run: RecordedRun, key: str, row: ReportRow) -> list[Any]:
    """Return the recorded values of `key` that the computation of `row` uses, oldest first."""
    records = run.records
    if row.of_layout:
        newest = _layout(run.steps[-1])
        records = [record for record in records if _layout(record) in (newest, NO_LAYOUT)]
    return [record[key] for record in records if key in record]


def _layout(record: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the pair (layout, number of ranks) in the record of a step. Return NO_LAYOUT for other
    records."""
    return record.get("layout"), record.get("rank_count")


def _of_files(run: RecordedRun) -> dict[str, Any]:
    """Return the entries of the summary that come from other sources than `metrics.jsonl`: the
    run's configuration, timeline, profiles and history."""
    numbers: dict[str, Any] = {}
    if covers_state(run.config["parallel"].get("zero", 0)):
        numbers["sharding"] = trained.resolved(run.config).layout.sharding or "alone: none"
    if run.measured:
        numbers["bubble_fraction_planned"] = planned(run, run.measured).bubble_fraction()
        numbers["bubble_fraction_measured"] = compute_window(run.measured).bubble_fraction()
        numbers["step_shares"] = shares(run.measured)
    profiles = sorted((run.path / "profile").glob("*-rank-*"))
    if profiles:
        numbers["profiles"] = [str(path) for path in profiles]
    if run.attempts:
        numbers["attempts"] = trained.as_json(run.attempts)
    return numbers


def _drawn(run: RecordedRun) -> list[dict[str, Any]]:
    """Return a table for each training dataset: its path, and the number of its samples that the
    run has used, also as a fraction of all used samples and in epochs."""
    last = run.steps[-1]
    if "samples_drawn" not in last:  # written by an older version of ptdmpi
        return []
    counts = last["samples_drawn"]
    total = sum(counts)
    paths = trained.paths(run.attempts, run.config)
    return [
        {"path": path, "samples": count, "share": count / total, "epochs": epochs}
        for path, count, epochs in zip(paths, counts, last["epochs"], strict=True)
    ]


def _validation_losses(run: RecordedRun) -> dict[str, float]:
    """Return a dict for the newest validation: path of a dataset -> loss. The dict is empty if the
    run validates on a single dataset."""
    losses: dict[str, float] = {}
    if run.validations:
        losses = run.validations[-1].get("validation_losses", losses)
    return losses


def _tasks(run: RecordedRun) -> dict[str, Any]:
    """Return the step and the scores of the newest evaluation of tasks."""
    if not run.tasks:
        return {}
    return {"step": run.tasks[-1]["step"], "scores": run.tasks[-1]["tasks"]}


# For entries of the summary that are computed from several keys of the records: name of the entry
# -> function that computes its value. The value is empty if nothing is recorded.
_WITHIN: dict[str, Callable[[RecordedRun], Any]] = {
    "steps": lambda run: run.steps[-1]["step"],
    "drawn": _drawn,
    "validation_losses": _validation_losses,
    "gradient_noise": lambda run: noise.judged(run.steps),
    "tasks": _tasks,
    "wire": lambda run: traffic.sent(run.steps[-1], run.config),
}


def rows_of(numbers: dict[str, Any]) -> Rows:
    """Return the summary as rows (name, text) of the report's table."""
    rows: Rows = []
    for name, value in numbers.items():
        if name in _RECORDED:
            row = _RECORDED[name]
            rows.append((row.label or name.replace("_", " "), as_text(value, row.unit)))
        elif name in _ROWS:
            rows += _ROWS[name](value)
    return rows


def as_text(value: Any, unit: Unit) -> str:
    """Return one value of the summary as text, with its unit."""
    if value is None:
        return "unknown"
    match unit:
        case "seconds":
            return f"{value:.3f} s"
        case "bytes":
            return file_size(value)
        case "bytes per rank":
            return f"{value / 2**20:,.0f} MiB per rank"
        case "fraction":
            return f"{value:.1%}"
        case "of dense peak":
            return f"{value:.1%} of dense peak"
        case "text":
            return str(value)
    if isinstance(value, float) and value < 1000:
        return f"{value:.4f}"
    return f"{value:,.0f}"


def _rows_of_drawn(datasets: list[dict[str, Any]]) -> Rows:
    return [
        (
            f"drawn of {dataset['path']}",
            f"{dataset['samples']:,} samples, {dataset['share']:.2%}, "
            f"{dataset['epochs']:.3g} epochs",
        )
        for dataset in datasets
    ]


def _rows_of_tasks(tasks: dict[str, Any]) -> Rows:
    rows = []
    for path, scores in tasks["scores"].items():
        name, score = task_score(scores)
        error = scores["standard_error"]
        items = scores["items"]
        text = f"{name} {score:.1%} +- {error:.1%} of {items:,} items, step {tasks['step']:,}"
        rows.append((path, text))
    return rows


def _rows_of_bubble(which: str) -> Callable[[float], Rows]:
    return lambda share: [(f"bubble fraction {which}", f"{share:.1%} of ideal time")]


# name of an entry in the summary -> the row with this name in RECORD_KEYS
_RECORDED = {row.name: row for declared in RECORD_KEYS.values() for row in declared.rows}
# name of an entry in the summary -> function that returns its rows in the table
_ROWS: dict[str, Callable[[Any], Rows]] = {
    "steps": lambda steps: [("steps", f"{steps:,}")],
    "sharding": lambda sharding: [("sharding", sharding)],
    "drawn": _rows_of_drawn,
    "profiles": lambda paths: [("profile", path) for path in paths],
    "gradient_noise": noise.rows,
    "wire": traffic.rows,
    "tasks": _rows_of_tasks,
    "validation_losses": lambda losses: [
        (f"validation loss of {path}", f"{loss:.4f}") for path, loss in losses.items()
    ],
    "undeclared": lambda values: [(f"newest {key}", str(value)) for key, value in values.items()],
    "bubble_fraction_planned": _rows_of_bubble("planned"),
    "bubble_fraction_measured": _rows_of_bubble("measured"),
    "step_shares": lambda parts: [
        (f"step: {PARTS.get(part, part)}", f"{share:.1%}") for part, share in parts.items()
    ],
    "attempts": trained.rows,
}


def table(numbers: dict[str, Any]) -> str:
    """Return the summary as lines of text."""
    rows = rows_of(numbers)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
