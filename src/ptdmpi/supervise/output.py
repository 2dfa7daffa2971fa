"""The output of a launcher and its ranks. Lines from the ranks are printed at once. Lines from the
launcher itself are stored. They are printed at the end, but only if no rank has reported why the
job ended.
"""

import re
import sys
import threading
from collections.abc import Callable
from typing import IO, TextIO

from ptdmpi.base.say import put

# A launcher prints a line of dashes before and after each of its notices. The pattern matches only
# lines that begin with dashes, so lines of dashes that a rank prints inside a table are not hidden.
FRAME = re.compile(r"-{60,}\s*$")
NOISE = re.compile(
    r"\[[\w.-]+:\d+\] .*(PRTE|PMIX|ORTE|OPAL|help message|MCA parameter)"
    r"|srun: (error|Job step aborted|launch|Terminating|Force Terminated)|slurmstepd: "
    r"|\[(proxy|mpiexec)[:@]|^=+ *$|=   (BAD|EXIT|CLEANING|YOU)"
)
FIRST = "ptdmpi train: "  # the beginning of the first line of rank 0 (`comm.launch.begin`)
# the beginnings of lines in which a rank reports why the job ends
FAILED = r"stall: |stopped: (more than|a weight|adapt\.base) "
SAID = re.compile(rf"ptdmpi: error: |\[rank \d+ on |ptdmpi: interrupted|{FAILED}")
TRACEBACK = re.compile(rf"\[rank \d+ on [^]]*\] Traceback|{FAILED}")


class LauncherOutput:
    """The output of the launcher and the ranks, in one start of the ranks. Threads print this
    output line by line.

    `heard` is True if a rank has printed its first line. `said` is True if a rank has printed the
    reason why the job ends. `failed` is True if this reason was an exception or a hang of the
    program. `on_unread` is called when no process reads the output of this process any longer.
    """

    def __init__(self, pipes: list[tuple[IO[str], TextIO]], on_unread: Callable[[], None]) -> None:
        """Start one thread for each pair of files in `pipes`. The thread reads the first file of
        the pair until its end, and prints the lines to the second file."""
        self.heard = False
        self.said = False
        self.failed = False
        self._on_unread = on_unread
        self._unread = False
        self._held: list[str] = []
        self._threads = [
            threading.Thread(target=self._pass, args=pair, daemon=True) for pair in pipes
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, limit_s: float) -> None:
        """Wait until all lines are printed, but at most `limit_s` seconds for each pipe, because a
        process that outlives the launcher may keep a pipe open."""
        for thread in self._threads:
            thread.join(limit_s)

    def tell(self) -> None:
        """Print the stored lines from the launcher. This method is called if no rank has reported
        why the job ended."""
        for line in self._held:
            self._print(line, sys.stderr)
        self._held.clear()

    def _pass(self, source: IO[str], target: TextIO) -> None:
        framed = False
        for line in source:
            if FRAME.match(line):
                framed = not framed
                self._held.append(line)
            elif framed or NOISE.search(line):
                self._held.append(line)
            else:
                self.heard = self.heard or FIRST in line
                self.said = self.said or SAID.search(line) is not None
                self.failed = self.failed or TRACEBACK.search(line) is not None
                self._print(line, target)

    def _print(self, line: str, target: TextIO) -> None:
        if self._unread:
            return
        try:
            put(line.removesuffix("\n"), target)
        except (BrokenPipeError, ValueError):
            self._unread = True
            self._on_unread()
