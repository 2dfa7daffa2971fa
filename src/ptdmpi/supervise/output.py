"""The output of a launcher and its ranks: the ranks' lines pass, the launcher's noise waits."""

import re
import sys
import threading
from collections.abc import Callable
from typing import IO

# A launcher frames its notices by lines of dashes; a rank's line that looks so is a rank's table.
FRAME = re.compile(r"-{60,}\s*$")
NOISE = re.compile(
    r"\[[\w.-]+:\d+\] .*(PRTE|PMIX|ORTE|OPAL|help message|MCA parameter)"
    r"|srun: (error|SupervisedJob step aborted|launch|Terminating|Force Terminated)|slurmstepd: "
    r"|\[(proxy|mpiexec)[:@]|^=+ *$|=   (BAD|EXIT|CLEANING|YOU)"
)
# By these lines a rank itself says why the job ends.
SAID = re.compile(r"ptdmpi: error: |\[rank \d+ on |ptdmpi: interrupted|stall: ")
TRACEBACK = re.compile(r"\[rank \d+ on [^]]*\] Traceback|stall: ")


class LauncherOutput:
    """What one start of the ranks prints; threads pass it on line by line.

    `said`: a rank has said why it ends. `failed`: it was by an exception or a hang of the program.
    `unread` becomes true once nobody reads what this process prints.
    """

    def __init__(self, pipes: list[tuple[IO[str], IO[str]]], on_unread: Callable[[], None]) -> None:
        """Read from the first of each pair until it ends, and print to the second."""
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
        """Wait until all is printed, at most `limit_s` for each pipe: a process that outlives the
        launcher may hold one open."""
        for thread in self._threads:
            thread.join(limit_s)

    def tell(self) -> None:
        """Print the launcher's notices: no rank has said why the job ended."""
        for line in self._held:
            self._print(line, sys.stderr)
        self._held.clear()

    def _pass(self, source: IO[str], target: IO[str]) -> None:
        framed = False
        for line in source:
            if FRAME.match(line):
                framed = not framed
                self._held.append(line)
            elif framed or NOISE.search(line):
                self._held.append(line)
            else:
                self.said = self.said or SAID.search(line) is not None
                self.failed = self.failed or TRACEBACK.search(line) is not None
                self._print(line, target)

    def _print(self, line: str, target: IO[str]) -> None:
        if self._unread:
            return
        try:
            target.write(line)
            target.flush()
        except (BrokenPipeError, ValueError):
            self._unread = True
            self._on_unread()
