"""Measured beside predicted: the same timeline and parts of a step, and the largest difference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ptdmpi.config import Config, InputError
from ptdmpi.plan.cost import pipeline
from ptdmpi.plan.cost.methods import MethodPricer
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.layout.messages import RunMethod
from ptdmpi.plan.machine.cluster import Model, cluster_names, load_cluster
from ptdmpi.plan.schedule.simulate import Span, Timeline
from ptdmpi.plan.show.table import lines
from ptdmpi.report import trained

# part -> kinds of spans; what is left of all kinds of ops without collectives inside computes
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
# collectives inside of ops, by group -> part
INSIDE = {"tensor": "tensor axis", "shard": "data axis"}


def parts(timeline: Timeline) -> dict[str, float]:
    """Seconds of a step by what they are spent on, the mean of the ranks; they add up to the step
    with "other".

    A rank that has nothing left to compute waits for the last one, in whatever comes next: until
    then its time counts as bubble.
    """
    ranks, spent = timeline.ranks, dict.fromkeys(PARTS, 0.0)
    part_of = {kind: name for name, kinds in PARTS.items() for kind in kinds}
    computing = [span for span in timeline.spans if span.computes]
    end_s = max((span.end_s for span in computing), default=timeline.start_s)
    ends_s = dict.fromkeys(ranks, end_s)
    ends_s |= {span.rank: span.end_s for span in sorted(computing, key=lambda s: s.end_s)}
    for span in timeline.spans:
        start_s = max(span.start_s, end_s) if span.kind in AFTERWARDS else span.start_s
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
    """The step of a run's configuration as its cluster file foresees it."""
    checked = trained.resolved(config)
    batch, layout = checked.batch.global_size, checked.layout
    pricer = pricer_of(checked, vocab_size, cluster)
    price, times = pricer.price(layout), pricer.stage_times(layout)
    microbatches = layout.microbatches(batch)
    title = f"predicted on {pricer.cluster.name}"
    timeline = pipeline.timeline(layout.schedule, microbatches, times, title)
    spans = list(timeline.spans)
    end_s, inside_s = timeline.makespan_s, {}
    seconds = pricer.stage_seconds(layout)
    for rank in range(layout.pipeline):
        own = [seconds[stage] for stage in times.placed.stages_of(rank)]
        messages_s = sum(forward.messages + backward.messages for forward, backward in own)
        inside_s[rank] = {"tensor": microbatches * messages_s}
        behind_s = end_s + price.parts.data
        spans.append(Span(rank, "reduce", "", end_s, behind_s))
        spans.append(Span(rank, "optimizer", "", behind_s, behind_s + price.parts.optimizer))
    return replace(timeline, spans=tuple(spans), inside_s=inside_s)


def pricer_of(config: Config, vocab_size: int, cluster: str) -> Pricer:
    """What prices a resolved configuration on a cluster by name or file. Raises InputError where
    the cluster cannot be used."""
    model, batch = Model(config.run.name, config.model, vocab_size), config.batch.global_size
    told = (load_cluster(cluster), model, batch, config.precision.compute)
    return MethodPricer(*told, RunMethod.of(config))


def cluster_of(path: Path, config: dict[str, Any]) -> str | None:
    """The cluster that a run of directory `path` names, if its file is still there: where it was,
    or in the run directory."""
    name = config["run"].get("cluster", "")
    if not name:
        return None
    places = (Path(name), path / Path(name).name)
    if name in cluster_names():
        return name
    return next((str(place) for place in places if place.is_file()), None)


def comparison(measured: Timeline, foreseen: Timeline) -> dict[str, Any]:
    """Both as parts, and the part that differs most."""
    found, guessed = parts(measured), parts(foreseen)
    differences = {name: found[name] - guessed[name] for name in found}
    largest = max(differences, key=lambda name: abs(differences[name]))
    return {
        "measured_s": found,
        "predicted_s": guessed,
        "step_error": foreseen.makespan_s / measured.makespan_s - 1,
        "largest_difference": {"part": largest, "seconds": differences[largest]},
    }


def table(compared: dict[str, Any]) -> str:
    """The comparison as lines of text."""
    found, guessed = compared["measured_s"], compared["predicted_s"]
    step_s = sum(found.values())
    rows = [["part of the step", "measured", "predicted", "difference", ""]]
    for name in found:
        rows.append(_row(name, found[name], guessed[name], step_s))
    rows.append(_row("step", step_s, sum(guessed.values()), step_s))
    largest = compared["largest_difference"]
    seconds, name = largest["seconds"], largest["part"]
    more = "more" if seconds > 0 else "less"
    return "\n".join(
        [
            *lines(rows),
            "",
            f"largest difference: {name} took {abs(seconds) * 1e3:.1f} ms {more} than predicted, "
            f"{abs(seconds) / step_s:.1%} of the step",
        ]
    )


def _row(name: str, found_s: float, guessed_s: float, step_s: float) -> list[str]:
    return [
        name,
        f"{found_s * 1e3:.1f} ms",
        f"{guessed_s * 1e3:.1f} ms",
        f"{(found_s - guessed_s) * 1e3:+.1f} ms",
        f"{(found_s - guessed_s) / step_s:+.1%}",
    ]


def foreseen(
    path: Path, config: dict[str, Any], vocab_size: int | None, cluster: str | None
) -> Timeline | None:
    """What was predicted for the run of directory `path`: by `cluster`, else by the one that it
    names; None if there is none. Raises InputError where `cluster` cannot be used."""
    named = cluster or cluster_of(path, config)
    if named is None:
        return None
    if vocab_size is None:
        raise InputError(f"{path}: its records do not say vocab_size, so nothing can be predicted")
    return predicted(config, vocab_size, named)
