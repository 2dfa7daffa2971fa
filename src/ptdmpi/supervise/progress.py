"""The progress of a run, which the supervisor reads from the run directory."""

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ptdmpi.base.disk import open_file, read_file

TAIL_BYTES = 1 << 16
SAVE = "SAVE"  # name of the file that asks the ranks to save


@dataclass(frozen=True)
class RecordedStep:
    """The last recorded step of a run, the number of ranks that trained this step, and its loss. If
    no step is recorded, the step and the number of ranks are 0, and the loss is None.
    """

    step: int = 0
    ranks: int = 0
    loss: float | None = None


class FileVersion(NamedTuple):
    """A file's inode, size in bytes and time of the last change in nanoseconds. If a file is
    written again, its version changes."""

    inode: int
    size: int
    changed_ns: int


Versions = Mapping[str, FileVersion | None]  # the versions of files, by their names


@dataclass(frozen=True)
class RunProgress:
    """The progress of the run in the directory `path`. The complete run has `steps` steps."""

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
        """If the run is complete, return its number of steps; otherwise return None."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads(read_file(self.path / "done"))["steps"])
        return None

    def why(self, before: Versions) -> str:
        """Return the reason that the ranks have recorded for the end of the run. `before` has the
        versions of the files in REASONS before the last start of the ranks. Return "" if the ranks
        have not recorded a reason, for example because they were killed."""
        for name, reason in REASONS.items():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
                if self.version(name) not in (None, before[name]):
                    return reason(_last_lines(self.path / name))
        return ""

    def versions(self) -> Versions:
        """Return the version of each file in REASONS."""
        return {name: self.version(name) for name in REASONS}

    def version(self, name: str) -> FileVersion | None:
        """Return the version of a file in the run directory; None if there is no such file.

        Versions may only be tested for equality: times cannot be compared, because the clocks of
        hosts and file systems differ and may jump.
        """
        with contextlib.suppress(OSError):
            status = (self.path / name).stat()
            return FileVersion(status.st_ino, status.st_size, status.st_mtime_ns)
        return None

    def newest_checkpoint(self) -> tuple[str, int] | None:
        """Return the name of the newest checkpoint, and the time at which it was saved, in
        nanoseconds. Return None if the run has no checkpoint."""
        latest = self.path / "checkpoints" / "latest"
        with contextlib.suppress(OSError):
            name = read_file(latest).decode(errors="replace").strip()
            if re.fullmatch(r"step-\d+", name):
                return name, latest.stat().st_mtime_ns
        return None

    def ask_to_save(self) -> None:
        """Ask the ranks to save a checkpoint, by creating the file SAVE in the run directory. Do
        nothing if the file cannot be created."""
        with contextlib.suppress(OSError):
            (self.path / SAVE).touch()

    def withdraw(self) -> None:
        """Remove the file SAVE if it still exists, so that the ranks do not carry out the request
        after their next start."""
        with contextlib.suppress(OSError):
            (self.path / SAVE).unlink()

    def log(self, line: str) -> None:
        """Append a line to the run's log, if the run has one."""
        log = self.path / "log.txt"
        if log.is_file():
            with contextlib.suppress(OSError), open_file(log, "ab") as file:
                file.write(f"{line}\n".encode())


def _heading(table: list[bytes]) -> str:
    """Return the first line of the table of ranks, without "failed: ". Rank 0 writes this table
    after a failure or a stall."""
    return table[0].decode(errors="replace").removeprefix("failed: ")


def _recorded_reason(history: list[bytes]) -> str:
    """Return the reason for the end of an attempt, from the last line of the history file. Raises
    KeyError if this line records the beginning of an attempt."""
    why = str(json.loads(history[-1])["why"])
    return why.removeprefix("failed: ").removeprefix("stopped: ")


# The files in which the ranks record why they end. The function for each file reads the reason from
# its last lines.
REASONS: Mapping[str, Callable[[list[bytes]], str]] = {
    "stacks/table.txt": _heading,
    "history.jsonl": _recorded_reason,
}


def _last_lines(path: Path) -> list[bytes]:
    """Return the lines in the last TAIL_BYTES bytes of a file. The first of these lines may be
    incomplete. Raises OSError if the file cannot be read."""
    with open_file(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        return file.read().splitlines()
