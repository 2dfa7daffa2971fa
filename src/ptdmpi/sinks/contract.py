"""The interface that a sink must implement, and the state of the run (`Past`) that a sink receives
when it is created.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Past:
    """The state of a run at the time when the run is started or resumed.

    `path` is the run directory. Its file `metrics.jsonl` has the records of all steps up to `step`.
    A resumed run continues after step `step`. A new run has `step` 0. `dropped` is True if records
    of steps after `step` were removed from `metrics.jsonl` when the run resumed.
    """

    path: Path
    step: int
    dropped: bool


class Sink(Protocol):
    """The interface of a sink, which passes records to a tool that shows them. If a method of a
    sink raises an exception, the run continues without this sink."""

    def record(self, values: dict[str, Any]) -> None:
        """Pass one record of `metrics.jsonl` to the tool. The run calls this method once for each
        record, in the order of the records in the file."""

    def close(self) -> None:
        """Write all records that are not written yet, and close the sink."""
