"""Clocks that time what a rank does: the host's here, a device's beside its wire.

Work that is handed to a device runs after the call that handed it over has returned, so the host's
time around the call says nothing. A moment is therefore a mark: put down in the order of the work,
read when the work before it is done. On the host that is at once.
"""

import time
from collections import deque
from typing import Protocol


class Mark(Protocol):
    """A moment in the order of a device's work, such as a CUDA event."""

    def done(self) -> bool:
        """Whether the work before it is done. Never waits; any thread may ask."""

    def at_s(self) -> float:
        """When that was, in seconds of `time.perf_counter`; only of a mark that is done."""


class Clock(Protocol):
    """Puts down marks on one device."""

    def mark(self) -> Mark:
        """Now, behind all work that was handed over so far."""

    def settle(self) -> None:
        """Wait for the device, so that all marks so far are done, and lay the two times upon each
        other. Once a step, where the host waits anyway: marks never make it wait."""


class HostMark(float):
    """A mark of the host's clock: its seconds."""

    __slots__ = ()

    def done(self) -> bool:
        return True

    def at_s(self) -> float:
        return float(self)


class HostClock:
    """The host works in the order of its calls: a mark is the time itself."""

    def mark(self) -> Mark:
        return HostMark(time.perf_counter())

    def settle(self) -> None:
        """Nothing is ever behind."""


HOST = HostClock()


class Total:
    """Adds up the seconds between pairs of marks, each as soon as its marks are done."""

    def __init__(self) -> None:
        self._done_s = 0.0
        self._open: deque[tuple[Mark, Mark]] = deque()

    def add(self, begin: Mark, end: Mark) -> None:
        """One more pair. Pairs that are done are added here, so that few are ever kept."""
        self._open.append((begin, end))
        self._add_done()

    @property
    def seconds(self) -> float:
        """Seconds between all pairs of marks that are done by now."""
        self._add_done()
        return self._done_s

    def _add_done(self) -> None:
        # a device works in order: behind a mark that is not done none is
        while self._open and self._open[0][1].done():
            begin, end = self._open.popleft()
            self._done_s += end.at_s() - begin.at_s()
