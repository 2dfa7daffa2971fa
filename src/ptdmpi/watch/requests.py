"""Requests to stop the run or to save a checkpoint. A request comes from a signal, from a file in
the run directory, or from the time limit of the run.

Each rank records the requests that it receives. After each step, all ranks vote in one small
collective, so that all stop after the same step.
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
from typing import NamedTuple, Protocol, Self

from ptdmpi.base import early
from ptdmpi.base.say import put, send_nowhere
from ptdmpi.config import SharedInputError

# The exit code (EX_TEMPFAIL) of a run that has saved and stopped on request. The same command then
# resumes the run.
STOPPED_EXIT_CODE = 75
# SIGINT is sent by Ctrl-C, and SIGHUP when a terminal is closed. If a launcher started the ranks,
# only the launcher gets these two signals.
SIGNALS = (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

# Rank 0 checks at most once per LOOK_S seconds whether the files STOP and SAVE exist, because on a
# parallel file system each check sends a message over the network.
LOOK_S = 1.0
# fraction of `max_minutes` that is reserved for a save, as long as no save has been timed
FIRST_SAVE_SHARE = 0.05

# In a vote, each reason to stop is a number, and the result is the greatest number. Numbers from
# _FIRST_SIGNAL on represent signals. _UNREADABLE means that a rank cannot read its data, and _GONE
# that the run directory was deleted or replaced.
_STOP_FILE = 1
_TIME_LIMIT = 2
_NO_READER = 3
_FIRST_SIGNAL = 4
_UNREADABLE = _FIRST_SIGNAL + len(SIGNALS)
_GONE = _UNREADABLE + 1
_RANKS = 1 << 32
# number of a reason -> text, for reasons that do not depend on the rank
_WORDS = {
    0: "",
    _STOP_FILE: "file STOP",
    _TIME_LIMIT: "run.max_minutes",
    _NO_READER: "nobody reads the output",
}


class Save(IntEnum):
    """A rank's request for a save, as a number in a vote. The result of the vote is the greatest
    number of all ranks."""

    NO = 0
    DUE = 1  # `save_minutes` have passed; treated like a regular save every `every_steps` steps.
    NOW = 2  # a user has requested a save; if the save fails, the run continues.
    LAST = 3  # the run ends after this save; if the save fails, the run fails


class StopRequest:
    """A context in which the signals in SIGNALS do not end this process, but are recorded.

    After the context, the process ignores these signals. If the process already ignores SIGHUP or
    SIGINT (because of nohup, or because it is a background job of a shell), the signal remains
    ignored. Python runs a signal handler only after the main thread has returned from an MPI call,
    which may never happen. Therefore each signal also writes a byte to a pipe, which the heartbeat
    thread reads.
    """

    def __init__(self) -> None:
        # the first signal that this process has received
        self.received: signal.Signals | None = None
        self.unread = False  # True if no process reads the output of this process any longer
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        # a full pipe must not block a signal handler (signal.set_wakeup_fd requires this)
        os.set_blocking(self._in, False)

    def __enter__(self) -> Self:
        signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        for number in SIGNALS:
            # SIGUSR1 and SIGTERM are always recorded, because nohup and shells ignore only SIGHUP
            # and SIGINT
            if signal.getsignal(number) != signal.SIG_IGN or number in (SIGNALS[0], SIGNALS[-1]):
                signal.signal(number, self._receive)
        early.release()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # the process is about to end: a late duplicate of a signal must not change its exit code
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)

    def show(self, line: str) -> None:
        """Print a line.

        If no process reads the output any longer (for example after `| head`), record a request to
        stop the run, and discard all further output.
        """
        try:
            put(line, sys.stdout)
        except BrokenPipeError:
            self.unread = True
            send_nowhere(sys.stdout)

    def wait(self, limit_s: float) -> list[signal.Signals]:
        """Return the signals that were received since the last call. If no signal was received,
        wait until a signal arrives, until `wake` is called, or until `limit_s` seconds have passed.

        Only one thread may call this method, and it must not be the main thread.
        """
        select.select([self._out], [], [], limit_s)
        try:
            numbers = os.read(self._out, 4096)
        except BlockingIOError:  # no signal has arrived within the time limit
            return []
        return [signal.Signals(number) for number in numbers if number in SIGNALS]

    def wake(self) -> None:
        """Make a running call of `wait` in another thread return at once."""
        os.write(self._in, b"\0")


class Ballot(NamedTuple):
    """The numbers that one rank contributes to a vote. For `stop` and for `save`, the result of the
    vote is the greatest number of all ranks."""

    stop: int
    save: int


@dataclass(frozen=True)
class Asked:
    """The result of a vote. `stop` is the reason to stop; it is empty if the run continues.
    `peak_memory_bytes` is the greatest peak memory of all ranks. If the reason is that a rank
    cannot read its data, `mistake` is the message of this rank's error; otherwise it is empty."""

    stop: str
    save: Save
    peak_memory_bytes: int
    mistake: str = ""


class Vote(Protocol):
    """A function that lets all ranks vote, such as `Lookout.vote`. `mistake` is the error with
    which this rank has failed to read its data, or None."""

    def __call__(self, mistake: Exception | None = None) -> Asked: ...


class _Files(NamedTuple):
    """The request files in the run directory: `stop` is True if the file STOP exists, and `save` is
    True if the file SAVE exists."""

    stop: bool
    save: bool


class Requests:
    """The requests to stop or save that this rank has received. Rank 0 also checks the time limits,
    and looks for the files STOP and SAVE.

    `directory` is the run directory. `max_minutes` is the time limit, counted from the start of the
    process (0: no limit). The run stops if another step and a save would exceed the limit. A save
    is due every `save_minutes` minutes (0: never). `mistake` is the error with which this rank has
    failed to read its data, or None.
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
        self.mistake: Exception | None = None
        self.steps = 0  # number of training steps that this process has done
        self.longest_step_s = 0.0
        self.longest_save_s = 0.0
        self._looked_s = -LOOK_S
        self._files = _Files(stop=False, save=False)
        self._gone = False
        # device number and inode number of the run directory
        self._place: tuple[int, int] | None = None

    def mine(self, rank: int) -> Ballot:
        """Return the numbers that this rank contributes to a vote."""
        save = Save.NO
        reasons = [0]
        if self.signals.received is not None:
            reasons.append(_FIRST_SIGNAL + SIGNALS.index(self.signals.received))
        if self.mistake is not None:
            reasons.append(_UNREADABLE)
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
        # if several ranks have the same reason, the lowest rank contributes the greatest number, so
        # the result of the vote names this rank
        return Ballot(code * _RANKS + _RANKS - 1 - rank, int(save))

    def _reasons_of_rank_0(self, stop_file: bool) -> list[int]:
        """Return the reasons to stop that only rank 0 checks."""
        reasons = {
            _STOP_FILE: stop_file,
            _TIME_LIMIT: self._late(),
            _NO_READER: self.signals.unread,
            _GONE: self._gone,
        }
        return [reason for reason, applies in reasons.items() if applies]

    def reason(self, stop: int) -> str:
        """Return the reason to stop, as text. `stop` is the result of the vote: the greatest `stop`
        of all ballots.

        Raise SharedInputError, on every rank, if the run directory no longer exists.
        """
        code, rest = divmod(stop, _RANKS)
        rank = _RANKS - 1 - rest
        if code == _GONE:
            raise SharedInputError(
                f"run.dir = {self.directory} was deleted or replaced while the run was going on: "
                "stopped, because nothing of it can be saved"
            )
        if code == _UNREADABLE:
            return f"rank {rank} ({self.hosts[rank]}) cannot read its data"
        if code >= _FIRST_SIGNAL:
            name = SIGNALS[code - _FIRST_SIGNAL].name
            return f"{name} on rank {rank} ({self.hosts[rank]})"
        return _WORDS[code]

    def failed(self, stop: int) -> int | None:
        """Return the rank that cannot read its data, if this is the reason to stop; otherwise
        return None. `stop` is the result of the vote, as in `reason`."""
        code, rest = divmod(stop, _RANKS)
        return _RANKS - 1 - rest if code == _UNREADABLE else None

    def stepped(self, elapsed_s: float) -> None:
        """Record a step that took `elapsed_s` seconds."""
        self.steps += 1
        self.longest_step_s = max(self.longest_step_s, elapsed_s)

    def saved(self, elapsed_s: float) -> None:
        """Record a save that took `elapsed_s` seconds."""
        self.longest_save_s = max(self.longest_save_s, elapsed_s)
        self._saved_s = time.monotonic()

    def obeyed(self, name: str) -> None:
        """On rank 0, remove the request file `name` from the run directory, so that the request is
        carried out only once. A directory with this name is not a request, and is not removed.
        """
        with contextlib.suppress(OSError):
            (self.directory / name).unlink()
        self._looked_s = -LOOK_S

    def _look(self) -> "_Files":
        """Return which of the files STOP and SAVE exist, and record whether the run directory was
        deleted or replaced. The file system is read at most once per LOOK_S seconds."""
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
            except OSError:  # this failure of the file system may be temporary
                return self._files
            else:
                place = (status.st_dev, status.st_ino)
                self._place = self._place or place
                self._gone = self._place != place
        return self._files

    def _late(self) -> bool:
        """Return True if one more step, with a save after it, might end after the time limit.

        Return False before the first step, so that each start of a run trains at least one step.
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
