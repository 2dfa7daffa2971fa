"""Requests to stop or to save: signals, files in the run directory, the time limit.

Each rank notes the requests that reach it. After each step all ranks vote, in one small message, so
that they stop after the same step.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple, Self

from ptdmpi.config import SharedInputError

# EX_TEMPFAIL: stopped on request after saving; the same command resumes
STOPPED_EXIT_CODE = 75
# Ctrl-C and a closed terminal, too: under a launcher, only the launcher gets these two.
SIGNALS = (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

# Seconds between two looks for files, on rank 0: on a parallel file system a look is a message.
LOOK_S = 1.0
# Share of `max_minutes` that is reserved for a save as long as none has been timed.
FIRST_SAVE_SHARE = 0.05

# Reasons to stop, as numbers of a vote; the greatest wins. Signals begin at _FIRST_SIGNAL.
_STOP_FILE = 1
_TIME_LIMIT = 2
_NO_READER = 3
_FIRST_SIGNAL = 4
_GONE = _FIRST_SIGNAL + len(SIGNALS)
_RANKS = 1 << 32
# reason -> words, for reasons that do not come from a rank
_WORDS = {
    0: "",
    _STOP_FILE: "file STOP",
    _TIME_LIMIT: "run.max_minutes",
    _NO_READER: "nobody reads the output",
}


class Save(IntEnum):
    """A rank's wish for a save; the greatest of all ranks wins."""

    NO = 0
    DUE = 1  # due by the clock; it counts like a multiple of `every_steps`
    NOW = 2  # requested by a user, who waits for it


class StopRequest:
    """A context in which this process notes SIGNALS instead of obeying them.

    After the context these signals are ignored. A signal that the process ignores already (by
    nohup, or in a shell's background) stays ignored. A handler in Python runs only after the main
    thread has returned from MPI, which it may never do, so each signal also leaves a byte in a pipe
    for another thread.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None  # the first one
        self.unread = False  # no process reads the output of this one
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        # a full pipe must not hold up a signal handler (signal.set_wakeup_fd asks for it)
        os.set_blocking(self._in, False)

    def __enter__(self) -> Self:
        signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        for number in SIGNALS:
            # SIGUSR1 and SIGTERM in any case: nohup and shells ignore only the other two
            if signal.getsignal(number) != signal.SIG_IGN or number in (SIGNALS[0], SIGNALS[-1]):
                signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # the process ends now, and a late duplicate must not change its exit code
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)

    def show(self, line: str) -> None:
        """Print a line.

        If nobody reads the output any more (`| head`), ask the run to stop and discard all further
        output.
        """
        try:
            print(line, flush=True)
        except BrokenPipeError:
            self.unread = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)

    def wait(self, limit_s: float) -> list[signal.Signals]:
        """Return the signals since the last call; wait for one up to `limit_s`, or until `wake`.

        One thread may call it, but not the main one.
        """
        select.select([self._out], [], [], limit_s)
        try:
            numbers = os.read(self._out, 4096)
        except BlockingIOError:  # the time is up
            return []
        return [signal.Signals(number) for number in numbers if number in SIGNALS]

    def wake(self) -> None:
        """Let `wait` return now."""
        os.write(self._in, b"\0")


class Ballot(NamedTuple):
    """The numbers of one rank in a vote; the greatest of all ranks win."""

    stop: int
    save: int


@dataclass(frozen=True)
class Asked:
    """The result of a vote. `stop` is the reason to stop; it is empty if the run continues."""

    stop: str
    save: Save
    peak_memory_bytes: int


class _Files(NamedTuple):
    """The files STOP and SAVE: are they in the run directory?"""

    stop: bool
    save: bool


class Requests:
    """The requests that have reached this rank; rank 0 also checks the clock and looks for files.

    `STOP` and `SAVE` are files in the run directory. `max_minutes` (0: no limit) counts from the
    start of the process; the run stops early enough for one more step and a save. A save is due
    every `save_minutes` (0: never).
    """

    def __init__(
        self,
        signals: StopRequest,
        directory: Path,
        hosts: Sequence[str],
        *,
        max_minutes: float,
        save_minutes: float = 0.0,
    ) -> None:
        self.signals = signals
        self.directory = directory
        self.hosts = hosts
        self.limit_s = max_minutes * 60
        self.save_s = save_minutes * 60
        self._saved_s = time.monotonic()
        self.began_s = time.monotonic() - process_age_s()
        self.steps = 0  # steps of this process
        self.longest_step_s = 0.0
        self.longest_save_s = 0.0
        self._looked_s = -LOOK_S
        self._files = _Files(stop=False, save=False)
        self._gone = False
        self._place: tuple[int, int] | None = None  # device and inode of the directory

    def mine(self, rank: int) -> Ballot:
        """Return the vote of this rank."""
        save = Save.NO
        reasons = [0]
        if self.signals.received is not None:
            reasons.append(_FIRST_SIGNAL + SIGNALS.index(self.signals.received))
        if rank == 0:
            files = self._look()
            if files.save:
                save = Save.NOW
            elif 0 < self.save_s <= time.monotonic() - self._saved_s:
                save = Save.DUE
            reasons += self._reasons_of_rank_0(files.stop)
        code = max(reasons)
        if code == 0:
            return Ballot(0, int(save))
        # if several ranks have the same reason, the lowest rank has the greatest number
        return Ballot(code * _RANKS + _RANKS - 1 - rank, int(save))

    def _reasons_of_rank_0(self, stop_file: bool) -> list[int]:
        """Return the reasons to stop that only rank 0 looks for."""
        reasons = {
            _STOP_FILE: stop_file,
            _TIME_LIMIT: self._late(),
            _NO_READER: self.signals.unread,
            _GONE: self._gone,
        }
        return [reason for reason, applies in reasons.items() if applies]

    def reason(self, stop: int) -> str:
        """Return the greatest `stop` of all ballots in words.

        Raise SharedInputError, on every rank, if the run directory does not exist any more.
        """
        code, rest = divmod(stop, _RANKS)
        rank = _RANKS - 1 - rest
        if code == _GONE:
            raise SharedInputError(
                f"run.dir = {self.directory} was deleted or replaced while the run was going on: "
                "stopped, because nothing of it can be saved"
            )
        if code >= _FIRST_SIGNAL:
            name = SIGNALS[code - _FIRST_SIGNAL].name
            return f"{name} on rank {rank} ({self.hosts[rank]})"
        return _WORDS[code]

    def stepped(self, elapsed_s: float) -> None:
        """Take note of a step that took `elapsed_s` seconds."""
        self.steps += 1
        self.longest_step_s = max(self.longest_step_s, elapsed_s)

    def saved(self, elapsed_s: float) -> None:
        """Take note of a save that took `elapsed_s` seconds."""
        self.longest_save_s = max(self.longest_save_s, elapsed_s)
        self._saved_s = time.monotonic()

    def obeyed(self, name: str) -> None:
        """Remove the file `name`, on rank 0, so that it counts once.

        Anything else of that name, such as a directory, is no request and is kept.
        """
        with contextlib.suppress(OSError):
            (self.directory / name).unlink()
        self._looked_s = -LOOK_S

    def _look(self) -> "_Files":
        """Look for the files and for the directory itself, once per LOOK_S."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._files = _Files(
                stop=(self.directory / "STOP").is_file(), save=(self.directory / "SAVE").is_file()
            )
            try:
                status = self.directory.stat()
            except FileNotFoundError:
                self._gone = True
            except OSError:  # the file system may fail only for a while
                return self._files
            else:
                place = (status.st_dev, status.st_ino)
                self._place = self._place or place
                self._gone = self._place != place
        return self._files

    def _late(self) -> bool:
        """Return True if one more step, with a save after it, could end after the limit.

        The first step is always made, so that a run that is started again and again makes progress.
        """
        if not self.limit_s or not self.steps:
            return False
        save_s = 2 * self.longest_save_s or FIRST_SAVE_SHARE * self.limit_s
        end_s = time.monotonic() - self.began_s + 1.5 * self.longest_step_s + save_s
        return end_s > self.limit_s


def process_age_s() -> float:
    """Return the seconds since this process started (proc(5): field 22 of /proc/PID/stat)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
