"""Comparison of a measured step with a predicted step. A step is divided into parts, such as
computation and the reduction of gradients, and the seconds of each part are compared."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptdmpi.config import Config, InputError
from ptdmpi.plan.cost import pipeline
from ptdmpi.plan.cost.methods import MethodTimes
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.layout.run_method import RunMethod
from ptdmpi.plan.machine.cluster import Model, load_cluster
from ptdmpi.plan.machine.names import preset_file
from ptdmpi.plan.schedule.simulate import Span, Timeline
from ptdmpi.plan.show.table import lines
from ptdmpi.report import trained

# PARTS maps the name of a part of a step to the kinds of spans that belong to this part. The part
# COMPUTING is the time of all ops, without the collectives inside the ops.
WAITING = "bubble and messages between stages"
AFTERWARDS = ("reduce", "optimizer")
COMPUTING = "computing"
PARTS: dict[str, tuple[str, ...]] = {
    COMPUTING: (),
    "tensor axis": ("gather",),
    WAITING: ("receive", "send"),
    "data axis": ("reduce",),
    "optimizer": ("optimizer",),
    "data": ("data",),
}
# INSIDE maps a group of ranks to a part of a step. If an op contains a collective of this group,
# the time of the collective is added to this part. The messages of attention over the context axis,
# and the messages to experts, are added to the tensor axis, because the prediction does the same.
INSIDE = {
    "tensor": "tensor axis",
    "context": "tensor axis",
    "expert": "tensor axis",
    "shard": "data axis",
}


def parts(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of each part of a step, averaged over the ranks. The sum of all parts,
    including "other", is the duration of the step.

    After its last op, a rank waits for the slowest rank. This waiting time is added to the part
    "bubble and messages between stages".
    """
    ranks = timeline.ranks
    spent = dict.fromkeys(PARTS, 0.0)
    part_of = {kind: name for name, kinds in PARTS.items() for kind in kinds}
    computing = [span for span in timeline.spans if span.computes]
    end_s = max((span.end_s for span in computing), default=timeline.start_s)
    ends_s = dict.fromkeys(ranks, end_s)
    ends_s |= {span.rank: span.end_s for span in sorted(computing, key=lambda s: s.end_s)}
    for span in timeline.spans:
        start_s = span.start_s
        if span.kind in AFTERWARDS:
            start_s = max(start_s, end_s)
        part = COMPUTING if span.computes else part_of.get(span.kind)
        if part is not None:
            spent[part] += max(0.0, span.end_s - start_s)
    for of_rank in timeline.inside_s.values():
        for group, seconds in of_rank.items():
            spent[COMPUTING] -= seconds
            spent[INSIDE[group]] += seconds
    spent[WAITING] += sum(end_s - own_s for own_s in ends_s.values())
    spent = {name: seconds / len(ranks) for name, seconds in spent.items()}
    spent["other"] = timeline.makespan_s - sum(spent.values())
    return spent


def predicted(config: dict[str, Any], vocab_size: int, cluster: str) -> Timeline:
    """Return the predicted timeline of a step, for a run's configuration `config` on the cluster
    `cluster`."""
    checked = trained.resolved(config)
    layout = checked.layout
    pricer = pricer_of(checked, vocab_size, cluster)
    price = pricer.price(layout)
    microbatches = layout.microbatches(checked.batch.global_size)
    times = pricer.times.stage_times(layout, microbatches)
    title = f"predicted on {pricer.cluster.name}"
    timeline = pipeline.timeline(layout.schedule, microbatches, times, title)
    spans = list(timeline.spans)
    end_s = timeline.makespan_s
    inside_s = {}
    seconds = pricer.times.stage_seconds(layout, microbatches)
    for rank in range(layout.pipeline):
        own = [seconds[stage] for stage in times.placed.stages_of(rank)]
        messages_s = sum(forward.messages + backward.messages for forward, backward in own)
        inside_s[rank] = {"tensor": microbatches * messages_s}
        reduced_s = end_s + price.parts.data
        spans.append(Span(rank=rank, kind="reduce", op="", start_s=end_s, end_s=reduced_s))
        spans.append(
            Span(
                rank=rank,
                kind="optimizer",
                op="",
                start_s=reduced_s,
                end_s=reduced_s + price.parts.optimizer,
            )
        )
    return replace(timeline, spans=tuple(spans), inside_s=inside_s)


def pricer_of(config: Config, vocab_size: int, cluster: str) -> Pricer:
    """Return the object that predicts step times for a complete configuration (a result of
    `resolve`). `cluster` is the name of a cluster or the path of a cluster file.

    Raise InputError if the cluster cannot be used.
    """
    machines = load_cluster(cluster)
    nodes = math.ceil(config.layout.ranks / machines.node.devices)
    times = MethodTimes(
        machines,
        Model(config.run.name, config.model, vocab_size),
        config.precision.compute,
        RunMethod.of(config, nodes),
    )
    return Pricer(times, config.batch.global_size)


def cluster_of(path: Path, config: dict[str, Any]) -> str | None:
    """Return the run's cluster, which is the value of run.cluster: the name of a predefined
    cluster, or the path of a cluster file. Return None if run.cluster is empty, or if the file is
    missing.

    A cluster file is searched for first at the path in run.cluster, then in the run directory
    `path`.
    """
    name = config["run"].get("cluster", "")
    if not name:
        return None
    if preset_file(name) is not None:
        return name
    for place in (Path(name), path / Path(name).name):
        if place.is_file():
            return str(place)
    return None


def comparison(measured: Timeline, foreseen: Timeline) -> dict[str, Any]:
    """Return a table that compares the measured step with the predicted step. It has the seconds of
    each part of both steps, the relative error of the predicted step time, and the part with the
    largest difference."""
    measured_s = parts(measured)
    predicted_s = parts(foreseen)
    differences = {name: measured_s[name] - predicted_s[name] for name in measured_s}
    largest = max(differences, key=lambda name: abs(differences[name]))
    return {
        "measured_s": measured_s,
        "predicted_s": predicted_s,
        "step_error": foreseen.makespan_s / measured.makespan_s - 1,
        "largest_difference": {"part": largest, "seconds": differences[largest]},
    }


def table(compared: dict[str, Any]) -> str:
    """Return the result of `comparison` as lines of text."""
    measured_s = compared["measured_s"]
    predicted_s = compared["predicted_s"]
    step_s = sum(measured_s.values())
    rows = [["part of the step", "measured", "predicted", "difference", ""]]
    for name in measured_s:
        rows.append(_row(name, measured_s[name], predicted_s[name], step_s))
    rows.append(_row("step", step_s, sum(predicted_s.values()), step_s))
    seconds = compared["largest_difference"]["seconds"]
    part = compared["largest_difference"]["part"]
    more = "more" if seconds > 0 else "less"
    return "\n".join(
        [
            *lines(rows),
            "",
            f"largest difference: {part} took {abs(seconds) * 1e3:.1f} ms {more} than predicted, "
            f"{abs(seconds) / step_s:.1%} of the step",
        ]
    )


def _row(name: str, measured_s: float, predicted_s: float, step_s: float) -> list[str]:
    return [
        name,
        f"{measured_s * 1e3:.1f} ms",
        f"{predicted_s * 1e3:.1f} ms",
        f"{(measured_s - predicted_s) * 1e3:+.1f} ms",
        f"{(measured_s - predicted_s) / step_s:+.1%}",
    ]


def foreseen(
    path: Path, config: dict[str, Any], vocab_size: int | None, cluster: str | None
) -> Timeline | None:
    """Return the predicted step for the run in directory `path`; None if no cluster is known.

    The prediction is for the cluster `cluster`. If `cluster` is None, it is for the run's own
    cluster. `vocab_size` is None if the run has not recorded its vocabulary size. Raise InputError
    if the cluster cannot be used or `vocab_size` is None.
    """
    named = cluster or cluster_of(path, config)
    if named is None:
        return None
    if vocab_size is None:
        raise InputError(f"{path}: its records do not say vocab_size, so nothing can be predicted")
    return predicted(config, vocab_size, named)
