"""Rank 1's watch over rank 0, which hears all others and whom nobody else would miss."""

import contextlib
import math
import sys
from pathlib import Path

from ptdmpi.watch.whereabouts import LEAST_SILENCE_S, SILENT_BEATS, Ranks


class Deputy:
    """When rank 0 was heard last, and what follows from its silence.

    Every rank has one; rank 1 alone listens, from the heart's start on, and what was never heard
    is never missed, so on all other ranks nothing comes of it. `stall_s` 0: it warns, and no more.
    """

    def __init__(self, ranks: Ranks, directory: Path, stall_s: float) -> None:
        self.ranks, self.directory, self.stall_s = ranks, directory, stall_s
        self._heard_s = math.inf
        self._missed_s: float | None = None  # since when it is missed, once that was said

    def hear(self, now_s: float) -> None:
        """Rank 0 says that it is alive."""
        self._heard_s = now_s
        if self._missed_s is not None:
            away_s = now_s - self._missed_s
            self._tell(f"{self.ranks.name(0)} is heard of again, after {away_s:.0f} s")
            self._missed_s = None

    def wake(self, now_s: float) -> None:
        """This process itself was stopped: nobody could be heard meanwhile."""
        if self._heard_s < math.inf:
            self._heard_s = now_s

    def replaces(self, now_s: float) -> bool:
        """Whether the job is to be ended in its place; a shorter silence is warned of, once."""
        silent_s = now_s - self._heard_s
        if self.stall_s and silent_s > max(self.stall_s, LEAST_SILENCE_S):
            return True
        if self._missed_s is None and silent_s > SILENT_BEATS * self.ranks.beat_s:
            self._missed_s = self._heard_s
            away = f"was not heard of for {silent_s:.0f} s"
            self._tell(f"warning: {self.ranks.name(0)} {away}, says {self.ranks.name(1)}")
        return False

    def pronounce(self, now_s: float) -> None:
        """Say what holds the job up: rank 0 does not even say where it is, so its process is
        stopped, or sits in a call that lets no thread run."""
        self._tell(
            f"stall: {self.ranks.name(0)} has not been heard for {now_s - self._heard_s:.0f} s: "
            "its process is stopped, or hangs in a call that lets no thread of it run; stacks of "
            f"the others: {self.directory / 'stacks'}"
        )

    def _tell(self, line: str) -> None:
        """Rank 1 speaks where rank 0 does not; the log gets it too, if it can."""
        print(line, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError), open(self.directory / "log.txt", "a") as log:
            log.write(line + "\n")
