"""The numbers of a run that its table and --json show."""

from collections.abc import Callable
from typing import Any

from ptdmpi.config import InputError
from ptdmpi.config.zero import covers_state
from ptdmpi.report import noise, traffic, trained
from ptdmpi.report.run import VALIDATION, RecordedRun
from ptdmpi.report.steps import PARTS, compute_window, planned, shares
from ptdmpi.sinks.record import median, task_score

Rows = list[tuple[str, str]]

# keys of a validation that the table shows in addition to its loss
_VALIDATION_KEYS = (*VALIDATION[1:], "validation_sentence_order_loss", "validation_losses")


def summary(run: RecordedRun) -> dict[str, Any]:
    """Return the numbers for the table, in its order. Raise InputError if no step is recorded."""
    if not run.steps:
        raise InputError(f"{run.path}: metrics.jsonl holds no step yet")
    numbers = {**_progress(run), **_quality(run), **_speed(run)}
    profiles = sorted((run.path / "profile").glob("*-rank-*"))
    if profiles:
        numbers["profiles"] = [str(path) for path in profiles]
    if run.attempts:
        numbers["attempts"] = trained.as_json(run.attempts)
    return numbers


def _progress(run: RecordedRun) -> dict[str, Any]:
    """Return the progress of the run, its layout, and its data."""
    last = run.steps[-1]
    numbers: dict[str, Any] = {
        "layout": last["layout"],
        "ranks": last["rank_count"],
        "steps": last["step"],
        "tokens": last["tokens"],
        "first_loss": run.steps[0]["loss"],
        "last_loss": last["loss"],
    }
    if covers_state(run.config["parallel"].get("zero", 0)):
        numbers["sharding"] = trained.resolved(run.config).layout.sharding or "alone: none"
    if "sentence_order_loss" in last:
        numbers["last_sentence_order_loss"] = last["sentence_order_loss"]
    if "samples_drawn" in last:
        numbers["drawn"] = _drawn(trained.paths(run.attempts, run.config), last)
    return numbers


def _drawn(paths: list[str], record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return, for each dataset, the number of samples that the run had used at the step of a
    record."""
    counts = record["samples_drawn"]
    total = sum(counts)
    return [
        {"path": path, "samples": count, "share": count / total, "epochs": epochs}
        for path, count, epochs in zip(paths, counts, record["epochs"], strict=True)
    ]


def _quality(run: RecordedRun) -> dict[str, Any]:
    """Return losses and scores from validations and tasks, and the noise of gradients."""
    numbers: dict[str, Any] = {}
    if run.validations:
        newest = run.validations[-1]
        numbers["validation_loss"] = newest["validation_loss"]
        numbers |= {key: newest[key] for key in _VALIDATION_KEYS if key in newest}
    for record in run.validations:
        if "bigram_validation_loss" in record:
            numbers["bigram_validation_loss"] = record["bigram_validation_loss"]
    if judged := noise.judged(run.steps):
        numbers["gradient_noise"] = judged
    if run.tasks:
        numbers["tasks"] = {"step": run.tasks[-1]["step"], "scores": run.tasks[-1]["tasks"]}
    return numbers


def _speed(run: RecordedRun) -> dict[str, Any]:
    """Return the medians of times and rates in the last layout, the memory, the traffic, and the
    parts of a step."""
    last = run.steps[-1]
    same_layout = [
        record
        for record in run.steps
        if record["layout"] == last["layout"] and record["rank_count"] == last["rank_count"]
    ]
    numbers: dict[str, Any] = {}
    for key in ("step_time_s", "tokens_per_s", "model_tflops_per_rank", "mfu"):
        numbers[f"median_{key}"] = median(record[key] for record in same_layout)
    numbers["peak_memory_bytes"] = max(record["peak_memory_bytes"] for record in run.steps)
    if wire := traffic.sent(last, run.config):
        numbers["wire"] = wire
    if run.measured:
        numbers["bubble_fraction_planned"] = planned(run, run.measured).bubble_fraction()
        numbers["bubble_fraction_measured"] = compute_window(run.measured).bubble_fraction()
        numbers["step_shares"] = shares(run.measured)
    return numbers


def rows_of(numbers: dict[str, Any]) -> Rows:
    """Return the summary as pairs of (name, text)."""
    rows: Rows = []
    for key, value in numbers.items():
        if key in _ROWS:
            rows += _ROWS[key](value)
        elif key not in ("step_shares", "comparison", "attempts"):
            name = key.removesuffix("_bytes").removesuffix("_time_s").replace("_", " ")
            rows.append((name, _text(key, value)))
    for key, share in numbers.get("step_shares", {}).items():
        rows.append((f"step: {PARTS.get(key, key)}", f"{share:.1%}"))
    if "attempts" in numbers:
        rows += trained.rows(numbers["attempts"])
    return rows


def _text(key: str, value: Any) -> str:
    """Return one number as text, with its unit."""
    if key.endswith("_bytes"):
        return f"{value / 2**20:,.0f} MiB per rank"
    if key.startswith("bubble_fraction"):
        return f"{value:.1%} of ideal time"
    if value is None:
        return "unknown"
    if key == "median_mfu":
        return f"{value:.1%} of dense peak"
    if key.endswith("_time_s"):
        return f"{value:.3f} s"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


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


# key of the summary -> a function that makes its rows
_ROWS: dict[str, Callable[[Any], Rows]] = {
    "drawn": _rows_of_drawn,
    "profiles": lambda paths: [("profile", path) for path in paths],
    "gradient_noise": noise.rows,
    "wire": traffic.rows,
    "tasks": _rows_of_tasks,
    "validation_losses": lambda losses: [
        (f"validation loss of {path}", f"{loss:.4f}") for path, loss in losses.items()
    ],
}


def table(numbers: dict[str, Any]) -> str:
    """Return the summary as lines of text."""
    rows = rows_of(numbers)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
