"""Requests to stop or to save: signals, files in the run directory, the time limit.

Each rank takes notes; at the end of a step all ranks vote, in one small message, so that they stop
after the same step.
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
from typing import Self

from ptdmpi.config import SharedInputError

# EX_TEMPFAIL: stopped on request after saving; the same command again goes on
STOPPED_EXIT_CODE = 75
# Ctrl-C and a closed terminal too: where a launcher stands between, they reach only that.
SIGNALS = (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

# Rank 0 looks for files at most this often: on a parallel file system a look is a message.
LOOK_S = 1.0
# Of `max_minutes`, for saving, while no save has shown yet how long one takes.
FIRST_SAVE_SHARE = 0.05

# What a vote can say, the most urgent last; between them the signals in their order.
_STOP_FILE, _TIME_LIMIT, _NO_READER, _FIRST_SIGNAL = 1, 2, 3, 4
_GONE = _FIRST_SIGNAL + len(SIGNALS)
_RANKS = 1 << 32


class Save(IntEnum):
    """What a vote can say of saving."""

    NO = 0
    DUE = 1  # by the clock: as at a multiple of `every_steps`
    NOW = 2  # somebody asks for it, and waits


class StopRequest:
    """Remembers which of SIGNALS came to this process while it is in the `with`; after it they are
    ignored. What the process ignores anyway (nohup, a shell's background) stays so.

    A handler in Python runs only when the main thread is back from MPI, which may be never, so
    each signal also leaves a byte in a pipe, where another thread can wait for it.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None  # the first one
        self.unread = False  # nobody reads what this process prints
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        # a full pipe must not hold up a signal handler (signal.set_wakeup_fd asks for it)
        os.set_blocking(self._in, False)

    def __enter__(self) -> Self:
        signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        for number in SIGNALS:
            # SIGUSR1 and SIGTERM in any case: nohup and shells ignore only the two between
            if signal.getsignal(number) != signal.SIG_IGN or number in (SIGNALS[0], SIGNALS[-1]):
                signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The process ends: a late duplicate must not change its exit code.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)

    def show(self, line: str) -> None:
        """Print a line. Where nobody reads any more (`| head`), the run is asked to stop, and what
        is printed from then on goes nowhere."""
        try:
            print(line, flush=True)
        except BrokenPipeError:
            self.unread = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)

    def wait(self, limit_s: float) -> list[signal.Signals]:
        """The signals that came since the last call; waits for one for up to `limit_s`, or until
        `wake`. For one thread other than the main one."""
        select.select([self._out], [], [], limit_s)
        try:
            numbers = os.read(self._out, 4096)
        except BlockingIOError:  # the time is up
            return []
        return [signal.Signals(number) for number in numbers if number in SIGNALS]

    def wake(self) -> None:
        """Have `wait` return now."""
        os.write(self._in, b"\0")


@dataclass(frozen=True)
class Asked:
    """What the ranks agreed on. `stop` says why, and is empty if nobody asked."""

    stop: str
    save: Save
    peak_memory_bytes: int


class Requests:
    """What this rank has to say in a vote; rank 0 also looks at the clock and for files.

    `STOP` and `SAVE` are files in the run directory. `max_minutes` (0: no limit) counts from the
    start of the process; the run stops early enough for one more step and a save. Every
    `save_minutes` (0: never) a save is due.
    """

    def __init__(
        self,
        signals: StopRequest,
        directory: Path,
        hosts: Sequence[str],
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
        self.steps = 0  # by this process
        self.longest_step_s = 0.0
        self.longest_save_s = 0.0
        self._looked_s = -LOOK_S
        self._files = (False, False)
        self._gone = False
        self._place: tuple[int, int] | None = None  # device and inode of the directory

    def mine(self, rank: int) -> tuple[int, int]:
        """(stop, save) of this rank; the greatest of all ranks is the answer."""
        received, save = self.signals.received, Save.NO
        code = 0 if received is None else _FIRST_SIGNAL + SIGNALS.index(received)
        if rank == 0:
            stop, now = self._look()
            due = 0 < self.save_s <= time.monotonic() - self._saved_s
            save = Save.NOW if now else Save.DUE if due else Save.NO
            unread = self.signals.unread
            code = max(code, _STOP_FILE * stop, _TIME_LIMIT * self._late(), _NO_READER * unread)
            code = max(code, _GONE * self._gone)
        # of equal reasons the lowest rank's is told
        return code * _RANKS + (_RANKS - 1 - rank if code else 0), int(save)

    def reason(self, stop: int) -> str:
        """The greatest `stop` in words. Raises SharedInputError, on every rank, where there is no
        run directory any more."""
        code, rest = divmod(stop, _RANKS)
        rank = _RANKS - 1 - rest
        if code == _GONE:
            raise SharedInputError(
                f"run.dir = {self.directory} was deleted or replaced while the run was going on: "
                "stopped, for nothing of it can be kept"
            )
        if code >= _FIRST_SIGNAL:
            name = SIGNALS[code - _FIRST_SIGNAL].name
            return f"{name} on rank {rank} ({self.hosts[rank]})"
        words = {_STOP_FILE: "file STOP", _TIME_LIMIT: "run.max_minutes"}
        return {0: "", _NO_READER: "nobody reads the output", **words}[code]

    def stepped(self, elapsed_s: float) -> None:
        self.steps += 1
        self.longest_step_s = max(self.longest_step_s, elapsed_s)

    def saved(self, elapsed_s: float) -> None:
        self.longest_save_s = max(self.longest_save_s, elapsed_s)
        self._saved_s = time.monotonic()

    def obeyed(self, name: str) -> None:
        """Rank 0 removes the file, so that it counts once. Something else of that name, such as a
        directory, is no request and stays."""
        with contextlib.suppress(OSError):
            (self.directory / name).unlink()
        self._looked_s = -LOOK_S

    def _look(self) -> tuple[bool, bool]:
        now = time.monotonic()
        if now - self._looked_s >= LOOK_S:
            self._looked_s = now
            stop, save = ((self.directory / name).is_file() for name in ("STOP", "SAVE"))
            self._files = (stop, save)
            try:
                status = self.directory.stat()
            except FileNotFoundError:
                self._gone = True
            except OSError:  # of a file system that fails for a while
                return self._files
            else:
                place = (status.st_dev, status.st_ino)
                self._place = self._place or place
                self._gone = self._place != place
        return self._files

    def _late(self) -> bool:
        """Whether one more step, with a save after it, could end after the limit.

        The first step is always made: a run that is started again and again gets on.
        """
        if not self.limit_s or not self.steps:
            return False
        save_s = 2 * self.longest_save_s or FIRST_SAVE_SHARE * self.limit_s
        end_s = time.monotonic() - self.began_s + 1.5 * self.longest_step_s + save_s
        return end_s > self.limit_s


def process_age_s() -> float:
    """Seconds since this process was started (Linux: proc(5), field 22 of /proc/PID/stat)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
