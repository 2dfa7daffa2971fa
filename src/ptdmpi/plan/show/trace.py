"""Export of timelines to files that Perfetto and chrome://tracing read."""

import json
from pathlib import Path

from ptdmpi.plan.schedule.simulate import Timeline
from ptdmpi.plan.show.draw import fill


def chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the timeline for Perfetto or chrome://tracing, with a process for each rank and times
    in microseconds.

    If the time unit of the timeline is not the second, one unit is shown as one millisecond. Raises
    InputError if `path` cannot be written.
    """
    us_per_unit = 1e6 if timeline.time_unit == "s" else 1e3
    events: list[dict[str, object]] = []
    for rank in timeline.ranks:
        common = {"ph": "M", "pid": rank, "tid": 0}
        events.append({**common, "name": "process_name", "args": {"name": f"rank {rank}"}})
        events.append({**common, "name": "process_sort_index", "args": {"sort_index": rank}})
    for span in timeline.spans:
        name = span.op if span.computes else f"{span.kind} {span.op}".strip()
        events.append(
            {
                "ph": "X",
                "pid": span.rank,
                "tid": 0,
                "cat": span.kind,
                "name": name,
                "ts": (span.start_s - timeline.start_s) * us_per_unit,
                "dur": (span.end_s - span.start_s) * us_per_unit,
            }
        )
    other = {"title": timeline.title, "time_unit": timeline.time_unit}
    trace = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})
    fill(Path(path), lambda file: file.write_text(trace, encoding="utf-8"))
