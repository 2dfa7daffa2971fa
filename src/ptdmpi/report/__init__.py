"""After the run: what a run directory says, as a table, pictures and a trace."""

import contextlib
import json
import statistics
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptdmpi.config import InputError
from ptdmpi.config.zero import covers_state
from ptdmpi.plan.schedule.ops import OP_KINDS, Op
from ptdmpi.plan.schedule.orders import build
from ptdmpi.plan.schedule.simulate import Timeline, simulate
from ptdmpi.plan.show import draw
from ptdmpi.plan.show.trace import chrome_trace
from ptdmpi.report import noise, traffic, trained
from ptdmpi.sinks.record import median, task_score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What a rank's step time is made of besides computing, in the words of the table.
PARTS = {
    "receive": "waiting for input (bubble and imbalance)",
    "gather": "gather of scattered activations",
    "send": "finishing sends",
    "reduce": "gradient reduction",
    "optimizer": "clipping and optimizer",
    "data": "data",
}

# What a record holds that is of a training step, and of a validation.
STEP = {"loss", "layout", "rank_count", "tokens"}
# the second and the third go with tokens and with classes
VALIDATION = ("validation_loss", "validation_perplexity", "validation_accuracy")


@dataclass(frozen=True)
class Run:
    """What a run directory holds: the configuration that trained the last step, its records, its
    measured timeline with the configuration of that step, and the attempts that trained it."""

    path: Path
    config: dict[str, Any]
    steps: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    tasks: list[dict[str, Any]]
    measured: Timeline | None
    measured_config: dict[str, Any]
    attempts: list[trained.Owed]


@dataclass(frozen=True)
class MeasuredCosts:
    """The mean duration of each stage's ops in a measured timeline; messages cost nothing."""

    mean_s: dict[tuple[str, int], float]

    @classmethod
    def of(cls, timeline: Timeline) -> "MeasuredCosts":
        durations: dict[tuple[str, int], list[float]] = {}
        for span in timeline.spans:
            if span.computes:
                op = Op.parse(span.op)
                durations.setdefault((op.kind, op.stage), []).append(span.end_s - span.start_s)
        return cls({key: statistics.mean(values) for key, values in durations.items()})

    def duration_s(self, op: Op) -> float:
        return self.mean_s[op.kind, op.stage]

    def travel_s(self, op: Op) -> float:
        return 0.0


def read(path: Path) -> Run:
    """The run of directory `path`. Raises InputError if it holds none."""
    try:
        config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
        text = (path / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(
            f"{path} is no run directory: {Path(error.filename).name}: {error.strerror}"
        ) from None
    except ValueError as error:
        raise InputError(f"{path}: config.toml is damaged: {error}") from None
    records = list(_records(text.splitlines()))
    steps = [record for record in records if record.keys() >= STEP]
    owed = trained.owed(path, steps)
    timelines = sorted((path / "timeline").glob("step-*.json"))
    at = int(timelines[-1].stem.removeprefix("step-")) if timelines else None
    return Run(
        path,
        trained.config_at(owed, None, config),
        steps,
        [record for record in records if VALIDATION[0] in record],
        [record for record in records if "tasks" in record],
        _timeline(timelines[-1]) if timelines else None,
        trained.config_at(owed, at, config),
        owed,
    )


def _timeline(path: Path) -> Timeline:
    try:
        return Timeline.from_json(path.read_text(encoding="utf-8"))
    except (InputError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from None


def _records(lines: list[str]) -> Iterator[dict[str, Any]]:
    """Without those that a crash has torn or a hand has spoilt; a resumed run drops torn ones."""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and _is_sound(record):
                yield record


def _is_sound(record: dict[str, Any]) -> bool:
    """Whether the record is of a step, its losses are numbers, and a validation is whole."""
    losses = (record.get(key, 0.0) for key in ("loss", *VALIDATION))
    whole = VALIDATION[0] not in record or any(key in record for key in VALIDATION[1:])
    numbers = all(isinstance(one, int | float) for one in losses)
    return isinstance(record.get("step"), int) and numbers and whole


def planned(run: Run, measured: Timeline) -> Timeline:
    """The run's schedule as it would go with the mean op times that were `measured` and without
    any waiting for messages: what is left of the bubble is the schedule's."""
    parallel, batch = run.measured_config["parallel"], run.measured_config["batch"]
    microbatches = batch["global_size"] // (parallel["data"] * batch["micro_size"])
    schedule = build(parallel["schedule"], parallel["pipeline"], parallel["virtual"], microbatches)
    timeline = simulate(schedule, MeasuredCosts.of(measured))
    return Timeline(timeline.spans, f"planned: {parallel['schedule']} with the measured op times")


def summary(run: Run) -> dict[str, Any]:
    """The numbers of the table, in its order."""
    if not run.steps:
        raise InputError(f"{run.path}: metrics.jsonl holds no step yet")
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
        numbers["drawn"] = drawn(trained.paths(run.attempts, run.config), last)
    if run.validations:
        numbers["validation_loss"] = run.validations[-1]["validation_loss"]
        for key in (*VALIDATION[1:], "validation_sentence_order_loss", "validation_losses"):
            if key in run.validations[-1]:
                numbers[key] = run.validations[-1][key]
    for record in run.validations:
        if "bigram_validation_loss" in record:
            numbers["bigram_validation_loss"] = record["bigram_validation_loss"]
    if found := noise.judged(run.steps):
        numbers["gradient_noise"] = found
    if run.tasks:
        numbers["tasks"] = {"step": run.tasks[-1]["step"], "scores": run.tasks[-1]["tasks"]}
    where = ("layout", "rank_count")  # another layout's steps take other times
    alike = [one for one in run.steps if all(one[key] == last[key] for key in where)]
    for key in ("step_time_s", "tokens_per_s", "model_tflops_per_rank", "mfu"):
        numbers[f"median_{key}"] = median(record[key] for record in alike)
    numbers["peak_memory_bytes"] = max(record["peak_memory_bytes"] for record in run.steps)
    if wire := traffic.sent(last, run.config):
        numbers["wire"] = wire
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


def drawn(paths: list[str], record: dict[str, Any]) -> list[dict[str, Any]]:
    """What the run took of each dataset of its mixture, up to a step's record."""
    counts, epochs = record["samples_drawn"], record["epochs"]
    total = sum(counts)
    return [
        {"path": path, "samples": count, "share": count / total, "epochs": read}
        for path, count, read in zip(paths, counts, epochs, strict=True)
    ]


def shares(timeline: Timeline) -> dict[str, float]:
    """Mean share of the ranks' time in the step, by kind of span; they add up to 1 with "other"."""
    whole = timeline.makespan_s * len(timeline.ranks)
    parts = dict.fromkeys([*_ops_of(timeline), *PARTS], 0.0)
    for span in timeline.spans:
        parts[span.kind] = parts.get(span.kind, 0.0) + (span.end_s - span.start_s) / whole
    parts["other"] = 1.0 - sum(parts.values())
    return parts


def _ops_of(timeline: Timeline) -> list[str]:
    """The kinds of spans that are ops, as far as they occur, in the order of their table."""
    found = {span.kind for span in timeline.spans}
    return [kind.span for kind in OP_KINDS.values() if kind.span in found]


def rows_of(numbers: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary as names and texts."""
    rows: list[tuple[str, str]] = []
    for key, value in numbers.items():
        if key in ("step_shares", "comparison", "attempts"):
            continue
        if key == "drawn":
            rows += [
                (
                    f"drawn of {of['path']}",
                    f"{of['samples']:,} samples, {of['share']:.2%}, {of['epochs']:.3g} epochs",
                )
                for of in value
            ]
            continue
        if key == "profiles":
            rows += [("profile", path) for path in value]
            continue
        if key == "gradient_noise":
            rows += noise.rows(value)
            continue
        if key == "wire":
            rows += traffic.rows(value)
            continue
        if key == "tasks":
            rows += [_task_row(path, of, value["step"]) for path, of in value["scores"].items()]
            continue
        if key == "validation_losses":
            rows += [(f"validation loss of {path}", f"{loss:.4f}") for path, loss in value.items()]
            continue
        name = key.removesuffix("_bytes").removesuffix("_time_s").replace("_", " ")
        if key.endswith("_bytes"):
            text = f"{value / 2**20:,.0f} MiB per rank"
        elif key.startswith("bubble_fraction"):
            text = f"{value:.1%} of ideal time"
        elif key == "median_mfu":
            text = f"{value:.1%} of dense peak"
        elif key.endswith("_time_s"):
            text = f"{value:.3f} s"
        elif isinstance(value, float):
            text = f"{value:,.0f}" if value >= 1000 else f"{value:.4f}"
        else:
            text = f"{value:,}" if isinstance(value, int) else str(value)
        rows.append((name, text))
    if "step_shares" in numbers:
        for key, share in numbers["step_shares"].items():
            rows.append((f"step: {PARTS.get(key, key)}", f"{share:.1%}"))
    return rows + (trained.rows(numbers["attempts"]) if "attempts" in numbers else [])


def _task_row(path: str, scores: dict[str, Any], step: int) -> tuple[str, str]:
    name, score = task_score(scores)
    error, items = scores["standard_error"], scores["items"]
    return path, f"{name} {score:.1%} +- {error:.1%} of {items:,} items, step {step:,}"


def table(numbers: dict[str, Any]) -> str:
    """The summary as lines of text."""
    rows = rows_of(numbers)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def write(run: Run, foreseen: Timeline | None, folder: Path) -> list[Path]:
    """Draw the pictures and the trace into `folder`; returns their paths. `foreseen`, if there is
    one, is drawn above what was measured. Raises InputError where the folder cannot be written."""
    paths = [folder / "loss.png"]
    loss_curve(run, paths[0])
    if run.tasks:
        paths.append(folder / "tasks.png")
        task_curves(run, paths[-1])
    if run.measured:
        shown, trace = folder / "timeline.png", folder / "trace.json"
        paths += [shown, trace]
        above = [] if foreseen is None else [compute_window(foreseen)]
        timelines = [*above, planned(run, run.measured), compute_window(run.measured)]
        draw.figure(timelines, shown)
        chrome_trace(run.measured, trace)
    return paths


def compute_window(timeline: Timeline) -> Timeline:
    """The part of a step that a schedule describes: without data, reduction and optimizer."""
    kinds = (*_ops_of(timeline), "receive", "send", "gather")
    spans = tuple(span for span in timeline.spans if span.kind in kinds)
    return Timeline(spans, timeline.title)


def loss_curve(run: Run, path: Path) -> None:
    """Training loss of each step, its running mean, validation points and the bigram's line."""
    figure, axes = _axes(run, "loss (nats per token)")
    tokens = [record["tokens"] for record in run.steps]
    losses = [record["loss"] for record in run.steps]
    axes.plot(tokens, losses, color="#9db8d9", linewidth=0.8, label="training loss")
    means, reach = centred_means(losses)
    if reach:
        label = f"mean of {2 * reach + 1} steps, centred"
        axes.plot(tokens, means, color="#1f4e8c", label=label)
    at = {record["step"]: record["tokens"] for record in run.steps}
    points = [(at[r["step"]], r["validation_loss"]) for r in run.validations if r["step"] in at]
    if points:
        axes.plot(*zip(*points, strict=True), "o-", color="#c8511b", label="validation loss")
    for record in run.validations:
        if "bigram_validation_loss" in record:
            level = record["bigram_validation_loss"]
            name = f"bigram model {level:.3f}"
            axes.axhline(level, color="#555555", linestyle="--", linewidth=1, label=name)
    axes.legend(frameon=False)
    draw.save(figure, path)


def task_curves(run: Run, path: Path) -> None:
    """The score of each task file over the tokens of the run, with its standard error."""
    from matplotlib.ticker import PercentFormatter

    figure, axes = _axes(run, "share of items that are right")
    at = {record["step"]: record["tokens"] for record in run.steps}
    records = [record for record in run.tasks if record["step"] in at]
    for number, file in enumerate(dict.fromkeys(file for one in records for file in one["tasks"])):
        asked = [(at[one["step"]], one["tasks"][file]) for one in records if file in one["tasks"]]
        scores = [(tokens, *task_score(of), of["standard_error"]) for tokens, of in asked]
        tokens, names, values, errors = zip(*scores, strict=True)
        axes.errorbar(
            tokens,
            values,
            errors,
            fmt="o-",
            color=f"C{number % 10}",
            markersize=4,
            linewidth=1.2,
            elinewidth=0.8,
            capsize=2,
            label=f"{Path(file).name}: {names[-1]}",
        )
    axes.set_ylim(0.0, 1.0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(frameon=False)
    draw.save(figure, path)


def _axes(run: Run, what: str) -> tuple["Figure", "Axes"]:
    """An empty picture of a run over its tokens."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("tokens")
    axes.set_ylabel(what)
    axes.set_title(f"{run.config['run']['name']}: {run.steps[-1]['layout']}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 12k, 3.5M, 2G
    return figure, axes


def centred_means(losses: list[float]) -> tuple[list[float], int]:
    """(the mean around each step, how many steps on either side it has): so that it neither lags
    behind the curve nor runs ahead of it, it has fewer on both sides near the ends."""
    last, reach = len(losses) - 1, len(losses) // 100
    nearby = (min(reach, i, last - i) for i in range(len(losses)))
    return [statistics.fmean(losses[i - k : i + k + 1]) for i, k in enumerate(nearby)], reach
