"""The curves of a run as data for the page."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ptdmpi.report.pictures import centred_means, loads_by_layer
from ptdmpi.report.run import RecordedRun
from ptdmpi.report.sound import is_drawable
from ptdmpi.sinks.record import task_score
from ptdmpi.train.records.keys import AHEAD

POINTS = 3000  # maximum number of points in a curve of the page
Points = list[tuple[float, float]]
Record = Mapping[str, Any]


class RecordCurve(NamedTuple):
    """A key of the records, the title of its chart, and the unit of its values: "number", "count"
    (an integer), "s", "bytes" or "fraction"."""

    key: str
    title: str
    unit: str = "number"


NUMBERED = tuple(enumerate(AHEAD, 1))
LOSS = RecordCurve("loss", "loss (nats per token)")
CURVES = (
    RecordCurve("learning_rate", "learning rate"),
    RecordCurve("grad_norm", "gradient norm, before clipping"),
    RecordCurve("tokens_per_s", "tokens/s"),
    RecordCurve("step_time_s", "time of a step", "s"),
    RecordCurve("mfu", "MFU (fraction of dense peak)", "fraction"),
    RecordCurve("peak_memory_bytes", "peak memory per rank", "bytes"),
    RecordCurve("sentence_order_loss", "sentence-order loss"),
    RecordCurve("balance_loss", "expert balance loss"),
    RecordCurve("router_z_loss", "z-loss of routers"),
    RecordCurve("distillation_loss", "divergence from the teacher"),
    *(RecordCurve(key, f"loss of the prediction {n} tokens further") for n, key in NUMBERED),
    RecordCurve("reward_margin", "margin of rewards"),
    RecordCurve("reward_accuracy", "accuracy of rewards", "fraction"),
    RecordCurve("validation_accuracy", "accuracy of validations", "fraction"),
    RecordCurve("consensus_distance", "distance between replicas"),
)
# keys whose values are lists with a number for each layer with experts
BY_LAYER = (
    RecordCurve("fullest_expert", "tokens of the fullest expert of a layer", "fraction"),
    RecordCurve("dead_experts", "experts without tokens, by layer", "count"),
)


def charts(run: RecordedRun) -> list[dict[str, Any]]:
    """Return the charts of a run. A chart is a dict with `key`, `title`, `unit` and `series`. A
    series has `name`, `kind`, and the lists `x` (steps) and `y` (values). `kind` is "line", "faint"
    (single values, over which their running mean is drawn), "dots" or "level" (one value for all
    steps)."""
    drawn = [_chart(LOSS, _losses(run))]
    drawn += [_chart(curve, [_series("", "line", _points(run, curve.key))]) for curve in CURVES]
    drawn += [_chart(curve, _by_layer(run, curve.key)) for curve in BY_LAYER]
    tasks = RecordCurve("tasks", "fraction of correct answers", "fraction")
    drawn.append(_chart(tasks, _scores(run)))
    return [chart for chart in drawn if chart["series"]]


def _chart(curve: RecordCurve, series: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a chart. Series without points are left out."""
    return {
        "key": curve.key,
        "title": curve.title,
        "unit": curve.unit,
        "series": [drawn for drawn in series if drawn["x"]],
    }


def _series(name: str, kind: str, points: Points) -> dict[str, Any]:
    kept = thinned(points)
    return {
        "name": name,
        "kind": kind,
        "x": [x for x, _ in kept],
        "y": [_short(y) for _, y in kept],
    }


def _short(value: float) -> float:
    """Return the value rounded to six significant digits, which is enough for a curve. An integer
    is not rounded."""
    return value if value.is_integer() else float(f"{value:.6g}")


def _points(run: RecordedRun, key: str) -> Points:
    return points(run.records, lambda record: record.get(key))


def points(
    records: Iterable[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], Any]
) -> Points:
    """Return a pair (step, value) for each record for which the function `value` returns a finite
    number."""
    pairs = ((record["step"], value(record)) for record in records)
    return [(step, float(number)) for step, number in pairs if is_drawable(number)]


def thinned(line: Points, most: int = POINTS) -> Points:
    """Return at most `most` of the points of a curve, in their order.

    The points are divided into groups of neighbours, and the lowest and the highest point of each
    group are returned. So no spike disappears, and every returned point was recorded.
    """
    if len(line) <= most:
        return line
    groups = most // 2
    edges = [round(i * len(line) / groups) for i in range(groups + 1)]
    kept: Points = []
    for start, end in itertools.pairwise(edges):
        group = line[start:end]
        ends = {min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _losses(run: RecordedRun) -> Iterator[dict[str, Any]]:
    """Yield the series of the losses: the training loss, its mean over neighbouring steps (if there
    are many steps), the validation loss, and the loss of a bigram model."""
    losses = points(run.steps, lambda record: record["loss"])
    means, reach = centred_means([loss for _, loss in losses])
    if reach:
        yield _series("training", "faint", losses)
        mean = list(zip([step for step, _ in losses], means, strict=True))
        yield _series(f"mean of {2 * reach + 1} steps", "line", mean)
    else:
        yield _series("training", "line", losses)
    yield _series("validation", "dots", _points(run, "validation_loss"))
    levels = _points(run, "bigram_validation_loss")
    yield _series("bigram model", "level", levels[-1:])


def _by_layer(run: RecordedRun, key: str) -> Iterator[dict[str, Any]]:
    """Yield a series of the values at `key` for each layer with experts."""
    for name, loads in loads_by_layer(run, key).items():
        pairs = [(record["step"], float(load)) for record, load in loads if is_drawable(load)]
        yield _series(name, "line", pairs)


def _scores(run: RecordedRun) -> Iterator[dict[str, Any]]:
    """Yield a series of the main scores for each task file."""
    files = {file for record in run.tasks for file in record["tasks"]}
    for file in sorted(files):
        asked = [record for record in run.tasks if file in record["tasks"]]

        def score(record: Record, file: str = file) -> float:
            return task_score(record["tasks"][file])[1]

        yield _series(Path(file).name, "dots", points(asked, score))
