"""Spans of what a rank does, and the place where it is, for its heartbeat to tell."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from ptdmpi.comm.clock import Clock, Mark
from ptdmpi.plan.schedule.simulate import Span

COMPUTE_STEPS = 20  # own work is judged by the median of so many steps


class Doing(NamedTuple):
    """`kind` and `op` as in a Span; `peer`: the pipeline rank whose message is waited for."""

    kind: str
    op: str
    peer: int | None
    since_s: float  # of time.perf_counter


class Place:
    """Where a rank is: written by the thread that trains, read by the heartbeat's.

    `doing` is replaced as a whole, so a reader never sees half of it. `phase` is "start-up",
    "training", "validation", "saving" or "ending"; `step` counts from 1; `compute_s` are the
    seconds of this rank's own work in each of the last steps.
    """

    def __init__(self) -> None:
        self.phase = "start-up"
        self.step = 0
        self.compute_s: deque[float] = deque(maxlen=COMPUTE_STEPS)
        self.doing = Doing("", "", None, time.perf_counter())

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.doing = Doing("", "", None, time.perf_counter())


class Stopwatch:
    """Collects the spans of one rank, by the clock of the device that does the work."""

    def __init__(self, rank: int, place: Place, clock: Clock) -> None:
        self.rank, self.place, self.clock = rank, place, clock
        self._marked: list[tuple[str, str, Mark, Mark]] = []

    @contextlib.contextmanager
    def span(self, kind: str, op: str = "", peer: int | None = None) -> Iterator[None]:
        """What is done inside is one span. The place is the host's: where it hangs, if it does."""
        self.place.doing = Doing(kind, op, peer, time.perf_counter())
        # no finally: what raises leaves no span, and `place` says for the table where it was
        begin = self.clock.mark()
        yield
        self._marked.append((kind, op, begin, self.clock.mark()))

    @property
    def spans(self) -> list[Span]:
        """All spans so far, in the order in which they ended; once their marks are done."""
        return [
            Span(self.rank, kind, op, begin.at_s(), end.at_s())
            for kind, op, begin, end in self._marked
        ]

    @property
    def compute_s(self) -> float:
        """Seconds in ops of the schedule, once their marks are done."""
        return sum(span.end_s - span.start_s for span in self.spans if span.computes)
