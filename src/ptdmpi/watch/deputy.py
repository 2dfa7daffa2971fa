"""The monitoring of rank 0 by rank 1. Rank 0 monitors all other ranks, and only rank 1 monitors
rank 0.
"""

import contextlib
import math
import sys
from pathlib import Path

from ptdmpi.watch.whereabouts import LEAST_SILENCE_S, SILENT_BEATS, Ranks


class Deputy:
    """The object with which rank 1 monitors rank 0. This object stores the time of the last message
    from rank 0. If rank 0 is silent for too long, this object first prints a warning, and later
    ends the job.

    Every rank has a `Deputy` object, but only rank 1 gets messages from rank 0. Rank 0 sends
    messages from the start of the heartbeat on. Before the first message, rank 1 does not monitor
    rank 0. If `stall_s` is 0, the deputy prints a warning, but never ends the job.
    """

    def __init__(self, ranks: Ranks, directory: Path, stall_s: float) -> None:
        self.ranks = ranks
        self.directory = directory
        self.stall_s = stall_s
        self._heard_s = math.inf
        # the time of the last message from rank 0, if a warning was printed; otherwise None
        self._missed_s: float | None = None

    def hear(self, now_s: float) -> None:
        """Record that a message from rank 0 has arrived at the time `now_s`."""
        self._heard_s = now_s
        if self._missed_s is not None:
            away_s = now_s - self._missed_s
            self._tell(f"{self.ranks.name(0)} is heard of again, after {away_s:.0f} s")
            self._missed_s = None

    def wake(self, now_s: float) -> None:
        """Record that this process was suspended, and could not receive messages during that time.
        The silence of rank 0 is measured from `now_s` on."""
        if self._heard_s < math.inf:
            self._heard_s = now_s

    def replaces(self, now_s: float) -> bool:
        """Return True if rank 0 has been silent so long that rank 1 must end the job. After a
        shorter silence, print a single warning."""
        silent_s = now_s - self._heard_s
        if self.stall_s and silent_s > max(self.stall_s, LEAST_SILENCE_S):
            return True
        if self._missed_s is None and silent_s > SILENT_BEATS * self.ranks.beat_s:
            self._missed_s = self._heard_s
            away = f"was not heard of for {silent_s:.0f} s"
            self._tell(f"warning: {self.ranks.name(0)} {away}, says {self.ranks.name(1)}")
        return False

    def pronounce(self, now_s: float) -> None:
        """Print the reason for which rank 1 ends the job.

        Rank 0 is silent, so either its process is suspended, or it is in a call during which no
        other thread of the process can run.
        """
        self._tell(
            f"stall: {self.ranks.name(0)} has not been heard for {now_s - self._heard_s:.0f} s: "
            "its process is stopped, or hangs in a call that blocks all its threads; stacks of "
            f"the others: {self.directory / 'stacks'}"
        )

    def _tell(self, line: str) -> None:
        """Print a line, and append it to the log file if the file can be written."""
        print(line, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError), open(self.directory / "log.txt", "a") as log:
            log.write(line + "\n")
