"""Pictures of one run (loss, task scores, expert loads, timeline), and the trace of a step."""

import statistics
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ptdmpi.config.kinds import mixing_layers
from ptdmpi.plan.schedule.simulate import Timeline
from ptdmpi.plan.show import draw
from ptdmpi.plan.show.trace import chrome_trace
from ptdmpi.report.run import RecordedRun
from ptdmpi.report.steps import timelines
from ptdmpi.sinks.record import task_score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LABELS = 12  # maximum number of layers in a legend; a larger legend would hide the curves
MOST_ROWS = 40  # maximum number of layers with a label in a heat map


def write(run: RecordedRun, foreseen: Timeline | None, folder: Path) -> list[Path]:
    """Write the pictures and the trace of a run to `folder`, and return their paths.

    `foreseen` is the timeline of the predicted step, which is drawn above the measured step, or
    None. Raise InputError if the folder cannot be written to.
    """
    loss = folder / "loss.png"
    loss_curve(run, loss)
    paths = [loss]
    if run.tasks:
        tasks = folder / "tasks.png"
        task_curves(run, tasks)
        paths.append(tasks)
    if any("fullest_expert" in record for record in run.steps):
        experts = folder / "experts.png"
        load_curves(run, experts)
        paths.append(experts)
    newest = newest_loads(run)
    if newest is not None:
        loads = folder / "loads.png"
        load_map(newest, loads)
        paths.append(loads)
    if run.measured:
        timeline = folder / "timeline.png"
        draw.figure(timelines(run, run.measured, foreseen), timeline)
        trace = folder / "trace.json"
        chrome_trace(run.measured, trace)
        paths += [timeline, trace]
    return paths


def loss_curve(run: RecordedRun, path: Path) -> None:
    """Plot the training loss, its running mean, the validation losses, and the loss of a bigram
    model."""
    figure, axes = _axes(run, "loss (nats per token)")
    tokens = [record["tokens"] for record in run.steps]
    losses = [record["loss"] for record in run.steps]
    axes.plot(tokens, losses, color="#9db8d9", linewidth=0.8, label="training loss")
    means, reach = centred_means(losses)
    if reach:
        label = f"mean of {2 * reach + 1} steps, centred"
        axes.plot(tokens, means, color="#1f4e8c", label=label)
    points = validation_points(run)
    if points:
        axes.plot(*zip(*points, strict=True), "o-", color="#c8511b", label="validation loss")
    for record in run.validations:
        if "bigram_validation_loss" in record:
            level = record["bigram_validation_loss"]
            name = f"bigram model {level:.3f}"
            axes.axhline(level, color="#555555", linestyle="--", linewidth=1, label=name)
    axes.legend(frameon=False)
    draw.save(figure, path)


def task_curves(run: RecordedRun, path: Path) -> None:
    """Plot the score on each task file, with its standard error, over the number of trained
    tokens."""
    from matplotlib.ticker import PercentFormatter

    figure, axes = _axes(run, "fraction of correct answers")
    for number, (file, results) in enumerate(_task_results(run).items()):
        scores = [task_score(result) for _, result in results]
        axes.errorbar(
            [tokens for tokens, _ in results],
            [score for _, score in scores],
            [result["standard_error"] for _, result in results],
            fmt="o-",
            color=f"C{number % 10}",
            markersize=4,
            linewidth=1.2,
            elinewidth=0.8,
            capsize=2,
            label=f"{Path(file).name}: {scores[-1][0]}",
        )
    axes.set_ylim(0.0, 1.0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(frameon=False)
    draw.save(figure, path)


def load_curves(run: RecordedRun, path: Path) -> None:
    """Plot the fraction of the tokens that the most loaded expert of each layer gets, over the
    number of trained tokens."""
    from matplotlib.ticker import PercentFormatter

    figure, axes = _axes(run, "tokens of the fullest expert of a layer")
    for number, (name, shares) in enumerate(loads_by_layer(run, "fullest_expert").items()):
        axes.plot(
            [record["tokens"] for record, _ in shares],
            [share for _, share in shares],
            color=f"C{number % 10}",
            linewidth=0.8,
            label=name,
        )
    axes.set_ylim(bottom=0.0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if len(axes.lines) <= MOST_LABELS:
        axes.legend(frameon=False)
    draw.save(figure, path)


class Loads(NamedTuple):
    """The loads of the experts in the step number `step`: for each layer with experts, its name and
    the load of each expert, divided by the mean load of the layer's experts."""

    step: int
    layers: list[str]
    relative: list[list[float]]


def newest_loads(run: RecordedRun) -> Loads | None:
    """Return the newest recorded loads of all experts; None if no record has them."""
    record = next((record for record in reversed(run.steps) if "expert_tokens" in record), None)
    if record is None:
        return None
    tokens: list[list[int]] = record["expert_tokens"]
    relative = [[round(load * len(row) / sum(row), 4) for load in row] for row in tokens]
    return Loads(record["step"], _layer_names(run, len(tokens)), relative)


def load_map(loads: Loads, path: Path) -> None:
    """Draw the load of each expert in one step: a row for each layer, a column for each expert."""
    from matplotlib.figure import Figure

    rows = len(loads.layers)
    height = 1.5 + 0.2 * min(max(rows, 8), MOST_ROWS)
    figure = Figure(figsize=(8, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    drawn = axes.imshow(loads.relative, aspect="auto", cmap="coolwarm", vmin=0.0, vmax=2.0)
    labelled = range(0, rows, -(-rows // MOST_ROWS))
    axes.set_yticks(labelled, [loads.layers[row] for row in labelled])
    axes.set_xlabel("expert")
    axes.set_title(f"step {loads.step:,}", loc="left")
    figure.colorbar(drawn, label="tokens / mean of the layer", extend="max")
    draw.save(figure, path)


def _layer_names(run: RecordedRun, count: int) -> list[str]:
    """Return the names of the `count` layers with experts."""
    model = run.config["model"]
    numbers = mixing_layers(
        model["layers"], model.get("dense_layers", 0), model.get("moe_every", 1)
    )
    if len(numbers) != count:
        return [f"layer with experts {place}" for place in range(count)]
    return [f"layer {number}" for number in numbers]


def loads_by_layer(run: RecordedRun, key: str) -> dict[str, list[tuple[dict[str, Any], float]]]:
    """Return a dict: name of a layer with experts -> list of pairs (record, value of this layer).
    The value at `key` in the record of a step is a list with one number for each of these layers. A
    record with a shorter list is damaged, and is left out."""
    records = [record for record in run.steps if record.get(key)]
    count = max((len(record[key]) for record in records), default=0)
    names = _layer_names(run, count)
    whole = [record for record in records if len(record[key]) == count]
    return {
        name: [(record, record[key][place]) for record in whole] for place, name in enumerate(names)
    }


def _task_results(run: RecordedRun) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Return a dict: path of a task file -> list of pairs (number of trained tokens at the
    evaluation, result)."""
    tokens = tokens_by_step(run)
    results = defaultdict(list)
    for record in run.tasks:
        if record["step"] in tokens:
            for file, result in record["tasks"].items():
                results[file].append((tokens[record["step"]], result))
    return results


def tokens_by_step(run: RecordedRun) -> dict[int, int]:
    """Return a dict: recorded step -> number of tokens trained up to this step."""
    return {record["step"]: record["tokens"] for record in run.steps}


def validation_points(run: RecordedRun) -> list[tuple[int, float]]:
    """Return a pair (number of trained tokens, validation loss) for each validation after a
    recorded step."""
    tokens = tokens_by_step(run)
    return [
        (tokens[record["step"]], record["validation_loss"])
        for record in run.validations
        if record["step"] in tokens
    ]


def _axes(run: RecordedRun, label: str) -> tuple["Figure", "Axes"]:
    """Return an empty picture whose horizontal axis shows trained tokens. `label` is the label of
    the vertical axis."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("tokens")
    axes.set_ylabel(label)
    axes.set_title(f"{run.config['run']['name']}: {run.steps[-1]['layout']}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    # this formatter prints numbers as 12k, 3.5M, 2G
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure, axes


def centred_means(losses: list[float]) -> tuple[list[float], int]:
    """Return two values: the running mean of the losses, with one mean for each step, and a number
    r. The mean of a step is over this step, the r steps before it and the r steps after it.

    Near the ends of the curve, a mean includes fewer than r steps on each side. Every mean includes
    the same number of steps before and after its step, so that the curve of means is not shifted.
    """
    reach = len(losses) // 100
    last = len(losses) - 1
    means = []
    for step in range(len(losses)):
        near = min(reach, step, last - step)
        means.append(statistics.fmean(losses[step - near : step + near + 1]))
    return means, reach
