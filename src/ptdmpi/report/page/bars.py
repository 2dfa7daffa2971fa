"""The timelines of a step as data for the page."""

from collections.abc import Sequence
from typing import Any

from ptdmpi.plan.schedule.ops import OP_KINDS, kind_of_span
from ptdmpi.plan.schedule.simulate import OTHER_SPANS, Timeline
from ptdmpi.plan.show.draw import Chunks, tint
from ptdmpi.report.run import RecordedRun
from ptdmpi.report.steps import timelines

WAITING = "receive"  # kind of the spans that the page draws like idle time, but with a frame


def step_timelines(run: RecordedRun, foreseen: Timeline | None) -> list[dict[str, Any]]:
    """Return the timelines of a step of the run: predicted (if `foreseen` is given), planned and
    measured.

    Each timeline is a dict with `title`, `unit`, `ranks`, `kinds` (a list of [name, colour]) and
    `spans` (a list of [rank, index into `kinds`, op, start, end]). Times are counted from the first
    op, so that the first ops of all timelines are aligned.
    """
    if run.measured is None:
        return []
    *earlier, _ = timelines(run, run.measured, foreseen)
    return [_timeline(timeline) for timeline in (*earlier, run.measured)]


def _timeline(timeline: Timeline) -> dict[str, Any]:
    chunks = Chunks(timeline)
    kinds = _kinds(timeline, chunks)
    origin = min((span.start_s for span in timeline.spans if span.computes), default=0.0)
    spans: list[Sequence[Any]] = []
    for span in sorted(timeline.spans, key=lambda span: (span.rank, span.start_s)):
        start, end = (round(moment - origin, 7) for moment in (span.start_s, span.end_s))
        kind = kinds[span.kind, chunks.shade_of(span)]
        spans.append((span.rank, kind, span.op, start, end))
    return {
        "title": timeline.title,
        "unit": timeline.time_unit,
        "ranks": timeline.ranks,
        "kinds": [_shown(kind, shade, chunks) for kind, shade in kinds],
        "spans": spans,
    }


def _kinds(timeline: Timeline, chunks: Chunks) -> dict[tuple[str, int], int]:
    """Return a dict: (kind of span, shade) -> number of its entry in the legend. The shade of an op
    depends on its model chunk. In the legend, ops come before other spans."""
    drawn = {(span.kind, chunks.shade_of(span)) for span in timeline.spans}
    order = [*(kind.span for kind in OP_KINDS.values()), *OTHER_SPANS]
    ordered = sorted(drawn, key=lambda pair: (order.index(pair[0]), pair[1]))
    return {pair: number for number, pair in enumerate(ordered)}


def _shown(kind: str, shade: int, chunks: Chunks) -> tuple[str, str]:
    """Return the name of a kind of span in the legend, and its colour. If a rank has several model
    chunks, the name of an op includes the chunks that are drawn in this shade."""
    if kind == WAITING:
        return "waiting for input", ""
    name = kind
    if chunks.count > 1 and kind_of_span(kind) is not None:
        alike = [chunk for chunk in range(chunks.count) if chunks.shade(chunk) == shade]
        name = f"{kind}, chunk {alike[0]}"
        if len(alike) > 1:
            name = f"{kind}, chunks {alike[0]} to {alike[-1]}"
    return name, tint(kind, shade)
