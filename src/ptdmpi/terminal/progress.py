"""Progress of what takes longer than some seconds: a bar on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from ptdmpi.base.words import counted, file_size
from ptdmpi.terminal.launched import launched_rank
from ptdmpi.terminal.say import quiet

# Until the first line of a log, what is done before it says nothing; where somebody waits for the
# answer; and between two lines at most.
FIRST_S, SOON_S, EVERY_S = 30.0, 2.0, 30.0


@contextmanager
def progress(
    what: str, total: float | None, unit: str, first_s: float = FIRST_S
) -> Iterator[Callable[[float], object]]:
    """A function that is told how many more of `total` units (None: nobody knows) are done.

    `unit`: what one of them is called; "B" counts bytes. On stderr; silent under --quiet and on all
    ranks but the first. In a log the first line comes after `first_s`, each further one after twice
    as long, up to `EVERY_S`.
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
    """A line every so often: how far it is, and how long it will take."""

    def __init__(self, what: str, total: float | None, unit: str, first_s: float) -> None:
        self.what, self.total, self.unit, self.wait_s = what, total, unit, first_s
        self.done = 0.0
        self.begin = self.told = time.monotonic()

    def update(self, more: float) -> None:
        self.done += more
        now = time.monotonic()
        if now - self.told >= self.wait_s:
            self.told, self.wait_s = now, min(2 * self.wait_s, EVERY_S)
            self.say(now - self.begin, sys.stderr)

    def say(self, elapsed_s: float, stream: TextIO) -> None:
        done = self._amount(self.done)
        if self.total and self.unit != "B":  # "3 of 8 files"
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
