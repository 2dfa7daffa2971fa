"""The interface that a sink must implement, and the description of a run's state that a sink gets
when the run starts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Past:
    """The state of a run at the time when the run is started or resumed.

    `path` is the run directory. Its file `metrics.jsonl` has the records of all steps up to `step`.
    The run resumes after step `step`. `dropped` is True if records of steps after `step` were
    removed from `metrics.jsonl` when the run resumed.
    """

    path: Path
    step: int
    dropped: bool


class Sink(Protocol):
    """The interface of a sink, which is a tool that shows records. If a method of a sink raises an
    exception, the run continues without the sink."""

    def record(self, values: dict[str, Any]) -> None:
        """Pass one record of `metrics.jsonl` to the tool. The run calls this method for each
        record, in the order in which records are written."""

    def close(self) -> None:
        """Write all records that are not written yet, and close the sink."""
