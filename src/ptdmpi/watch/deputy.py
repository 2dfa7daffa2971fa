"""The monitoring of rank 0 by rank 1. Rank 0 monitors all other ranks, and only rank 1 monitors
rank 0.
"""

import contextlib
import math
import sys
from pathlib import Path

from ptdmpi.base.disk import open_file
from ptdmpi.watch.whereabouts import LEAST_SILENCE_S, SILENT_BEATS, Ranks


class Deputy:
    """Rank 1's monitor of rank 0. It stores the time of the last message from rank 0. If rank 0 is
    silent for too long, the deputy first prints a warning, and later decides to end the job.

    Every rank has a `Deputy` object, but rank 0 reports only to rank 1 that it is alive. A deputy
    begins to monitor rank 0 at the first call of `hear`. If `stall_s` is 0, the deputy prints a
    warning, but the job is not ended.
    """

    def __init__(self, ranks: Ranks, directory: Path, stall_s: float) -> None:
        self.ranks = ranks
        self.directory = directory
        self.stall_s = stall_s
        self._heard_s = math.inf
        # time of the last message from rank 0 before the printed warning; None if no warning was
        # printed
        self._missed_s: float | None = None

    def hear(self, now_s: float) -> None:
        """Record that a message from rank 0 has arrived at the time `now_s`."""
        self._heard_s = now_s
        if self._missed_s is not None:
            away_s = now_s - self._missed_s
            self._tell(f"{self.ranks.name(0)} reports again after {away_s:.0f} s")
            self._missed_s = None

    def wake(self, now_s: float) -> None:
        """Record that this process was suspended and could not receive messages. From now on, the
        silence of rank 0 is counted from the time `now_s`."""
        if self._heard_s < math.inf:
            self._heard_s = now_s

    def replaces(self, now_s: float) -> bool:
        """Return True if rank 0 has been silent for so long that rank 1 must end the job. After a
        shorter silence, print a warning once."""
        silent_s = now_s - self._heard_s
        if self.stall_s and silent_s > max(self.stall_s, LEAST_SILENCE_S):
            return True
        if self._missed_s is None and silent_s > SILENT_BEATS * self.ranks.beat_s:
            self._missed_s = self._heard_s
            away = f"has not reported for {silent_s:.0f} s"
            self._tell(f"warning: {self.ranks.name(0)} {away}, says {self.ranks.name(1)}")
        return False

    def pronounce(self, now_s: float) -> None:
        """Print the reason why rank 1 ends the job.

        Rank 0 is silent, so its process is suspended, or its main thread is in a call during which
        no other thread of the process can run.
        """
        self._tell(
            f"stall: {self.ranks.name(0)} has not reported for {now_s - self._heard_s:.0f} s: "
            "its process is stopped, or hangs in a call that blocks all its threads; stacks of "
            f"the others: {self.directory / 'stacks'}"
        )

    def _tell(self, line: str) -> None:
        """Print a line, and append it to the run's log file if the file can be written."""
        print(line, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError), open_file(self.directory / "log.txt", "ab") as log:
            log.write(f"{line}\n".encode())
