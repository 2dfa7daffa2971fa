"""The interface that a sink must implement, and the description of a run's state that a sink gets
at the start.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Past:
    """The state of a run when it is started or resumed.

    `path` is the run directory, whose file `metrics.jsonl` has the records up to step `step`. The
    run resumes after step `step`. `dropped` is True if this start has removed records of later
    steps.
    """

    path: Path
    step: int
    dropped: bool


class Sink(Protocol):
    """The interface of a sink, which is a tool that shows records. If a method of a sink raises an
    exception, the run continues without the sink."""

    def record(self, values: dict[str, Any]) -> None:
        """Write one record of `metrics.jsonl` to the tool. The method is called in the order in
        which records are written."""

    def close(self) -> None:
        """Write all records to files, and close the sink."""
