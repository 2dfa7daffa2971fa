"""The interface that a sink must implement, and the description of a run's start that a
sink gets.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Past:
    """The state of a run when one of its processes starts.

    `path` is the run directory, whose metrics.jsonl has the kept records. The run resumes after
    step `step`. `dropped` is True if this start has dropped records after that step.
    """

    path: Path
    step: int
    dropped: bool


class Sink(Protocol):
    """One tool that shows records. If it raises, it is closed, and the run continues without it."""

    def record(self, values: dict[str, Any]) -> None:
        """Show one record of `metrics.jsonl`. Records arrive in the order of their steps."""

    def close(self) -> None:
        """Write all records to files, and close the sink."""
