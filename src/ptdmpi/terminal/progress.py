"""Progress of what takes longer than some seconds: a bar on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from ptdmpi.terminal.launched import launched_rank
from ptdmpi.terminal.say import quiet

EVERY_S = 30.0  # between two lines of a log; what is done before the first says nothing


@contextmanager
def progress(
    what: str, total: float | None, unit: str, every_s: float = EVERY_S
) -> Iterator[Callable[[float], object]]:
    """A function that is told how many more of `total` units (None: nobody knows) are done.

    "B" counts bytes. On stderr; silent under --quiet and on all ranks but the first.
    """
    if quiet() or launched_rank():
        yield lambda more: None
    elif sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=total, desc=what, unit=unit, unit_scale=unit == "B", leave=False) as bar:
            yield bar.update
    else:
        yield _Lines(what, total, unit, every_s).update


class _Lines:
    """A line every so often: how far it is, and how long it will take."""

    def __init__(self, what: str, total: float | None, unit: str, every_s: float) -> None:
        self.what, self.total, self.unit, self.every_s = what, total, unit, every_s
        self.done = 0.0
        self.begin = self.told = time.monotonic()

    def update(self, more: float) -> None:
        self.done += more
        now = time.monotonic()
        if now - self.told >= self.every_s:
            self.told = now
            self.say(now - self.begin, sys.stderr)

    def say(self, elapsed_s: float, stream: TextIO) -> None:
        text = f"{self.what}: {self._amount(self.done)}"
        if self.total:
            text += f" of {self._amount(self.total)} ({self.done / self.total:.0%})"
        text += f", {elapsed_s:,.0f} s"
        if self.total and self.done:
            text += f", about {elapsed_s * max(0.0, self.total / self.done - 1):,.0f} s left"
        print(text, file=stream, flush=True)

    def _amount(self, number: float) -> str:
        if self.unit == "B":
            return f"{number / 1e6:,.1f} MB"
        return f"{number:,.0f} {self.unit}"
