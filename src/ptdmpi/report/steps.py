"""Timelines of one step of a run: the measured timeline, the planned timeline and the predicted
timeline."""

import statistics
from dataclasses import dataclass

from ptdmpi.plan.schedule.ops import OP_KINDS, Op
from ptdmpi.plan.schedule.orders import build
from ptdmpi.plan.schedule.simulate import Timeline, simulate
from ptdmpi.report.run import RecordedRun

# kind of a span that is not an op -> name of this kind in the report's table
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
    """The duration of each op in a simulation: the mean duration of the ops of the same kind and
    stage in a measured timeline. Messages take no time."""

    mean_s: dict[tuple[str, int], float]

    @classmethod
    def of(cls, timeline: Timeline) -> "MeasuredCosts":
        """Return the mean durations of the ops in `timeline`."""
        durations: dict[tuple[str, int], list[float]] = {}
        for span in timeline.spans:
            if span.computes:
                op = Op.parse(span.op)
                durations.setdefault((op.kind, op.stage), []).append(span.end_s - span.start_s)
        return cls({key: statistics.mean(values) for key, values in durations.items()})

    def duration_s(self, op: Op) -> float:
        """Return the mean duration in seconds of ops with the same kind and stage as `op`."""
        return self.mean_s[op.kind, op.stage]

    def travel_s(self, op: Op) -> float:
        """Return 0: in this simulation, the output of an op is available to the next stage
        immediately."""
        return 0.0


def planned(run: RecordedRun, measured: Timeline) -> Timeline:
    """Simulate the run's schedule with the mean op times of `measured` and without messages. Return
    the timeline. The bubble in this timeline is due only to the schedule.
    """
    parallel = run.measured_config["parallel"]
    batch = run.measured_config["batch"]
    microbatches = batch["global_size"] // (parallel["data"] * batch["micro_size"])
    schedule = build(parallel["schedule"], parallel["pipeline"], parallel["virtual"], microbatches)
    timeline = simulate(schedule, MeasuredCosts.of(measured))
    return Timeline(timeline.spans, f"planned: {parallel['schedule']} with the measured op times")


def timelines(run: RecordedRun, measured: Timeline, foreseen: Timeline | None) -> list[Timeline]:
    """Return the timelines of the predicted step (if `foreseen` is given), the planned step and the
    measured step, in this order."""
    steps = [planned(run, measured), compute_window(measured)]
    if foreseen is not None:
        steps.insert(0, compute_window(foreseen))
    return steps


def compute_window(timeline: Timeline) -> Timeline:
    """Return the timeline of a step with only those spans that belong to the pipeline schedule. The
    spans for reading data, for the gradient reduction and for the optimizer are left out."""
    kinds = (*_kinds_of_ops(timeline), "receive", "send", "gather")
    spans = tuple(span for span in timeline.spans if span.kind in kinds)
    return Timeline(spans, timeline.title)


def shares(timeline: Timeline) -> dict[str, float]:
    """Return a dict: kind of span -> its fraction of the total time of all ranks. The sum of all
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
