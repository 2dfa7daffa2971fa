"""Timelines of a step of a run: the measured, the planned and the predicted timeline."""

import statistics
from dataclasses import dataclass

from ptdmpi.plan.schedule.ops import OP_KINDS, Op
from ptdmpi.plan.schedule.orders import build
from ptdmpi.plan.schedule.simulate import Timeline, simulate
from ptdmpi.report.run import RecordedRun

# kinds of spans that are not ops -> their names in the table
PARTS = {
    "receive": "waiting for input (bubble and imbalance)",
    "gather": "gather of scattered activations",
    "send": "finishing sends",
    "reduce": "gradient reduction",
    "optimizer": "clipping and optimizer",
    "data": "data",
}


@dataclass(frozen=True)
class MeasuredCosts:
    """The times of ops for a simulation: the mean seconds of each kind of op on each stage in a
    measured timeline. Messages take no time."""

    mean_s: dict[tuple[str, int], float]

    @classmethod
    def of(cls, timeline: Timeline) -> "MeasuredCosts":
        """Return the mean times of the ops in `timeline`."""
        durations: dict[tuple[str, int], list[float]] = {}
        for span in timeline.spans:
            if span.computes:
                op = Op.parse(span.op)
                durations.setdefault((op.kind, op.stage), []).append(span.end_s - span.start_s)
        return cls({key: statistics.mean(values) for key, values in durations.items()})

    def duration_s(self, op: Op) -> float:
        """Return the mean seconds of ops with the kind and the stage of `op`."""
        return self.mean_s[op.kind, op.stage]

    def travel_s(self, op: Op) -> float:
        """Return 0: in this simulation, the output of an op is available to its reader
        immediately."""
        return 0.0


def planned(run: RecordedRun, measured: Timeline) -> Timeline:
    """Return the timeline of the run's schedule, simulated with the mean op times of `measured` and
    without messages.

    So the schedule is the only cause of the bubble in the returned timeline.
    """
    parallel = run.measured_config["parallel"]
    batch = run.measured_config["batch"]
    microbatches = batch["global_size"] // (parallel["data"] * batch["micro_size"])
    schedule = build(parallel["schedule"], parallel["pipeline"], parallel["virtual"], microbatches)
    timeline = simulate(schedule, MeasuredCosts.of(measured))
    return Timeline(timeline.spans, f"planned: {parallel['schedule']} with the measured op times")


def timelines(run: RecordedRun, measured: Timeline, foreseen: Timeline | None) -> list[Timeline]:
    """Return three timelines: the predicted step (if there is one), the planned step and the
    measured step."""
    steps = [planned(run, measured), compute_window(measured)]
    if foreseen is not None:
        steps.insert(0, compute_window(foreseen))
    return steps


def compute_window(timeline: Timeline) -> Timeline:
    """Return only the spans of a step that belong to the pipeline's schedule. Spans of reading
    data, of gradient reduction and of the optimizer are left out."""
    kinds = (*_kinds_of_ops(timeline), "receive", "send", "gather")
    spans = tuple(span for span in timeline.spans if span.kind in kinds)
    return Timeline(spans, timeline.title)


def shares(timeline: Timeline) -> dict[str, float]:
    """Return, for each kind of span, its fraction of the time of all ranks. The sum of all
    fractions, including "other", is 1."""
    total_s = timeline.makespan_s * len(timeline.ranks)
    parts = dict.fromkeys([*_kinds_of_ops(timeline), *PARTS], 0.0)
    for span in timeline.spans:
        parts[span.kind] = parts.get(span.kind, 0.0) + (span.end_s - span.start_s) / total_s
    parts["other"] = 1.0 - sum(parts.values())
    return parts


def _kinds_of_ops(timeline: Timeline) -> list[str]:
    """Return the kinds of ops that occur in the timeline, in the order of `OP_KINDS`."""
    kinds = {span.kind for span in timeline.spans}
    return [kind.span for kind in OP_KINDS.values() if kind.span in kinds]
