"""The progress of a run while its ranks are supervised, read from its run directory."""

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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


class FileVersion(NamedTuple):
    """The inode, size in bytes and time of the last change (in nanoseconds) of a file. A file that
    was written again has another version."""

    inode: int
    size: int
    changed_ns: int


Versions = Mapping[str, FileVersion | None]  # the versions of files, by their names


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

    def why(self, before: Versions) -> str:
        """Return the reason why the run ended, if the ranks have recorded it. `before` has the
        versions of the files before this start of the ranks. Return "" if the ranks have recorded
        no reason, because they were killed."""
        for name, reason in REASONS.items():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
                if self.version(name) not in (None, before[name]):
                    return reason(_last_lines(self.path / name))
        return ""

    def versions(self) -> Versions:
        """Return the version of each file in which a start records the reason for its end."""
        return {name: self.version(name) for name in REASONS}

    def version(self, name: str) -> FileVersion | None:
        """Return the version of a file in the run directory; None if there is no such file.

        Versions are only tested for equality, because the clocks of hosts and file systems differ,
        and may jump.
        """
        with contextlib.suppress(OSError):
            status = (self.path / name).stat()
            return FileVersion(status.st_ino, status.st_size, status.st_mtime_ns)
        return None

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


# The files in which a start records the reason for its end, and the functions that read the reason
# from the last lines.
REASONS: Mapping[str, Callable[[list[bytes]], str]] = {
    "stacks/table.txt": _heading,
    "history.jsonl": _recorded_reason,
}


def _last_lines(path: Path) -> list[bytes]:
    """Return the lines in the last TAIL_BYTES bytes of a file; the beginning of the first of these
    lines may be missing. Raises OSError if the file cannot be read."""
    with open_file(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        return file.read().splitlines()
