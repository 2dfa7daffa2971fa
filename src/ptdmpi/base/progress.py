"""Progress of long work: a bar on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from ptdmpi.base.launched import launched_rank
from ptdmpi.base.say import quiet
from ptdmpi.base.words import counted, file_size

FIRST_S = 30.0  # seconds until the first line in a log; work that ends earlier prints no line.
SOON_S = 2.0  # seconds until the first line, if a user waits for the work to end.
EVERY_S = 30.0  # the longest time between two lines, in seconds


@contextmanager
def progress(
    what: str, total: float | None, unit: str, first_s: float = FIRST_S
) -> Iterator[Callable[[float], object]]:
    """Show the progress of some work on stderr. Yield a function, which the caller must call after
    each part of the work, with the number of completed units in that part.

    `what` names the work. `total` is the number of units, or None if it is unknown. `unit` is the
    name of one unit; "B" means bytes. In a log the first line is printed after `first_s` seconds.
    After each line the time until the next line doubles, up to `EVERY_S`. Nothing is shown
    with --quiet, or on ranks other than rank 0.
    """
    if quiet() or launched_rank():
        yield lambda more: None
    elif sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=total, desc=what, unit=unit, unit_scale=unit == "B", leave=False) as bar:
            yield bar.update
    else:
        yield _Lines(what, total, unit, first_s).update


class _Lines:
    """A progress display that prints lines to a log. Each line has the completed percentage of the
    work and the estimated remaining time in seconds.
    """

    def __init__(self, what: str, total: float | None, unit: str, first_s: float) -> None:
        self.what = what
        self.total = total
        self.unit = unit
        self.wait_s = first_s
        self.done = 0.0
        self.begin_s = time.monotonic()
        self.printed_s = self.begin_s

    def update(self, more: float) -> None:
        """Add `more` completed units. Print a line if the next line is due."""
        self.done += more
        now_s = time.monotonic()
        if now_s - self.printed_s >= self.wait_s:
            self.printed_s = now_s
            self.wait_s = min(2 * self.wait_s, EVERY_S)
            self.say(now_s - self.begin_s, sys.stderr)

    def say(self, elapsed_s: float, stream: TextIO) -> None:
        """Print a line about the progress on `stream`; the work began `elapsed_s` seconds ago."""
        done = self._amount(self.done)
        if self.total and self.unit != "B":  # for example "3 of 8 files"
            done = f"{self.done:,.0f}"
        text = f"{self.what}: {done}"
        if self.total:
            text += f" of {self._amount(self.total)} ({self.done / self.total:.0%})"
        text += f", {elapsed_s:,.0f} s"
        if self.total and self.done:
            text += f", about {elapsed_s * max(0.0, self.total / self.done - 1):,.0f} s left"
        print(text, file=stream, flush=True)

    def _amount(self, number: float) -> str:
        if self.unit == "B":
            return file_size(number)
        return counted(round(number), self.unit)
