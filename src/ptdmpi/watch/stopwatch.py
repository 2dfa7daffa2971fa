"""Spans of what a rank does, and the place where it is, for its heartbeat to tell."""

import time
from collections import deque
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


class _UnderWay(NamedTuple):
    """Work that was handed to a device: `doing` as the host saw it, and its two marks."""

    doing: Doing
    begin: Mark
    end: Mark


class Place:
    """Where a rank is: written by the thread that trains, read by the heartbeat's.

    `doing` is what the host does, and is replaced as a whole, so a reader never sees half of it.
    `phase` is "start-up", "training", "validation", "saving" or "ending"; `step` counts from 1;
    `compute_s` are the seconds of this rank's own work in each of the last steps.
    """

    def __init__(self) -> None:
        self.phase = "start-up"
        self.step = 0
        self.compute_s: deque[float] = deque(maxlen=COMPUTE_STEPS)
        self.doing = Doing("", "", None, time.perf_counter())
        self._under_way: deque[_UnderWay] = deque()

    def handed_over(self, doing: Doing, begin: Mark, end: Mark) -> None:
        """The host has gone on from a span; its device may not have."""
        while self._under_way and self._under_way[0].end.done():
            self._under_way.popleft()
        if not end.done():
            self._under_way.append(_UnderWay(doing, begin, end))

    def now(self) -> Doing:
        """What is done in truth: the oldest work that the device has not finished, else what the
        host does. For any thread: it asks marks, and waits for none."""
        # a copy, in one operation of the interpreter: the other thread changes it meanwhile
        for doing, begin, end in list(self._under_way):
            if not end.done():
                since_s = begin.at_s() if begin.done() else doing.since_s
                return doing._replace(since_s=since_s)
        return self.doing

    def forget_device(self) -> None:
        """From now on what the host does counts alone."""
        self._under_way = deque(maxlen=0)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.doing = Doing("", "", None, time.perf_counter())


class Spanned:
    """The inside of a span. Not a generator: a rank has thousands of these in a second."""

    __slots__ = ("_begin", "_doing", "_watch")

    def __init__(self, watch: "Stopwatch", kind: str, op: str, peer: int | None) -> None:
        self._watch = watch
        self._doing = Doing(kind, op, peer, time.perf_counter())

    def __enter__(self) -> None:
        self._watch.place.doing = self._doing
        self._begin = self._watch.clock.mark()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        # what raises leaves no span, and the place says for the table where it was
        if kind is None:
            self._watch.ended(self._doing, self._begin)


class Stopwatch:
    """Collects the spans of one rank, by the clock of the device that does the work."""

    def __init__(self, rank: int, place: Place, clock: Clock) -> None:
        self.rank, self.place, self.clock = rank, place, clock
        self._marked: list[tuple[str, str, Mark, Mark]] = []

    def span(self, kind: str, op: str = "", peer: int | None = None) -> "Spanned":
        """What is done inside is one span. The place is the host's: where it hangs, if it does."""
        return Spanned(self, kind, op, peer)

    def ended(self, doing: Doing, begin: Mark) -> None:
        """A span is over; its host goes on."""
        end = self.clock.mark()
        self._marked.append((doing.kind, doing.op, begin, end))
        self.place.handed_over(doing, begin, end)

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
