"""The progress of a run while its ranks are supervised, read from its run directory."""

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from ptdmpi.base.disk import open_file, read_file

TAIL_BYTES = 1 << 16
SAVE = "SAVE"  # name of the file by which the ranks are asked to save


@dataclass(frozen=True)
class RecordedStep:
    """The last recorded step of a run, the number of ranks that trained this step, and its loss. If
    no step is recorded, the step and the number of ranks are 0, and the loss is None.
    """

    step: int = 0
    ranks: int = 0
    loss: float | None = None


@dataclass(frozen=True)
class RunProgress:
    """The progress of the run in the directory `path`. `steps` is the number of steps of the
    complete run."""

    path: Path
    steps: int

    def newest(self) -> RecordedStep:
        """Return the last step that the run has recorded."""
        with contextlib.suppress(OSError):
            for line in reversed(_last_lines(self.path / "metrics.jsonl")):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    record = json.loads(line)
                    if "loss" in record:
                        return RecordedStep(
                            int(record["step"]), int(record["rank_count"]), float(record["loss"])
                        )
        return RecordedStep()

    def done(self) -> int | None:
        """Return the number of steps of a complete run; None if the run is not complete."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads(read_file(self.path / "done"))["steps"])
        return None

    def why(self, since_s: float) -> str:
        """Return the reason why the run ended, if the ranks have recorded it at the time `since_s`
        (seconds since 1970) or later. Return "" if the ranks have recorded no reason, because they
        were killed."""
        for name, reason in (("stacks/table.txt", _heading), ("history.jsonl", _recorded_reason)):
            path = self.path / name
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
                if path.stat().st_mtime >= since_s:
                    return reason(_last_lines(path))
        return ""

    def newest_checkpoint(self) -> tuple[str, int] | None:
        """Return the name of the newest checkpoint and the time of its save, in nanoseconds. Return
        None if the run has no checkpoint."""
        latest = self.path / "checkpoints" / "latest"
        with contextlib.suppress(OSError):
            name = read_file(latest).decode(errors="replace").strip()
            if re.fullmatch(r"step-\d+", name):
                return name, latest.stat().st_mtime_ns
        return None

    def ask_to_save(self) -> None:
        """Ask the ranks to save a checkpoint, by a file in the run directory; do nothing if the
        disk is full."""
        with contextlib.suppress(OSError):
            (self.path / SAVE).touch()

    def withdraw(self) -> None:
        """Remove a request to save that no rank has seen, so that the next start of the ranks does
        not obey it."""
        with contextlib.suppress(OSError):
            (self.path / SAVE).unlink()

    def log(self, line: str) -> None:
        """Append a line to the run's log, if the run has one."""
        log = self.path / "log.txt"
        if log.is_file():
            with contextlib.suppress(OSError), open(log, "a") as file:
                file.write(line + "\n")


def _heading(table: list[bytes]) -> str:
    """Return the first line of the table of ranks, which the ranks write if one of them failed."""
    return table[0].decode(errors="replace").removeprefix("failed: ")


def _recorded_reason(history: list[bytes]) -> str:
    """Return the reason in the last line of a history file. Raises KeyError if this line records
    the beginning of an attempt, not its end."""
    why = str(json.loads(history[-1])["why"])
    return why.removeprefix("failed: ").removeprefix("stopped: ")


def _last_lines(path: Path) -> list[bytes]:
    """Return the lines in the last TAIL_BYTES bytes of a file; the beginning of the first of these
    lines may be missing. Raises OSError if the file cannot be read."""
    with open_file(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        return file.read().splitlines()
