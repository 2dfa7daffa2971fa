"""The contract of a sink, and the start of a run as a sink sees it."""

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
        """Take one record of `metrics.jsonl`; they come in the order of their steps."""

    def close(self) -> None:
        """Write everything to files."""
