"""Measurement of a rank's work as a list of spans of time, and the rank's present activity, which
the heartbeat reports."""

import time
from collections import deque
from typing import NamedTuple

from ptdmpi.comm.clock import Clock, Mark
from ptdmpi.plan.schedule.simulate import Span

COMPUTE_STEPS = 20  # the time of a rank's own work is the median over this number of steps


class Doing(NamedTuple):
    """The activity of a rank at one moment.

    `kind` is the kind of work, such as "forward" or "receive". `op` is the name of an op of the
    schedule, such as "F2.0", or "" for other work. If the rank waits for a message, `peer` is the
    pipeline rank that must send this message. Otherwise `peer` is None.
    """

    kind: str
    op: str
    peer: int | None
    since_s: float  # time at which the activity began, as returned by time.perf_counter


class _UnderWay(NamedTuple):
    """Work that the host has launched on a device. `doing` is the activity of the host at that
    time. `begin` and `end` are marks (device events) before and after the work.
    """

    doing: Doing
    begin: Mark
    end: Mark


class Place:
    """The present activity of a rank in its run. The main thread writes the attributes, and the
    heartbeat's thread reads them.

    `doing` is the activity of the host. A change always replaces the whole object, so the
    heartbeat's thread never reads a mixture of two activities. `phase` is "start-up", "training",
    "validation", "tasks", "saving" or "ending". `step` is the number of the present step, counted
    from 1. `compute_s` lists the seconds of this rank's own work in each of the last steps.
    """

    def __init__(self) -> None:
        self.phase = "start-up"
        self.step = 0
        self.compute_s: deque[float] = deque(maxlen=COMPUTE_STEPS)
        self.doing = Doing("", "", None, time.perf_counter())
        self._under_way: deque[_UnderWay] = deque()

    def handed_over(self, doing: Doing, begin: Mark, end: Mark) -> None:
        """Store work that the host has launched on the device: the activity `doing` of the host,
        and the marks (device events) before and after the work. Later calls of this method remove
        the work after the device has finished it."""
        while self._under_way and self._under_way[0].end.done():
            self._under_way.popleft()
        if not end.done():
            self._under_way.append(_UnderWay(doing, begin, end))

    def now(self) -> Doing:
        """Return the present activity. If the device has unfinished work, return the activity of
        the oldest such work; otherwise return the activity of the host.

        Any thread may call this method. It never waits for the device.
        """
        # copy the queue in a single operation of the interpreter, because the main thread may
        # change it at any time
        for doing, begin, end in list(self._under_way):
            if not end.done():
                since_s = begin.at_s() if begin.done() else doing.since_s
                return doing._replace(since_s=since_s)
        return self.doing

    def forget_device(self) -> None:
        """Ignore the device from now on: all later calls of `now` return the activity of the
        host."""
        self._under_way = deque(maxlen=0)

    def enter(self, phase: str) -> None:
        """Begin the phase `phase`. The recorded activity is empty until the next span begins."""
        self.phase = phase
        self.doing = Doing("", "", None, time.perf_counter())


class Spanned:
    """A context that measures the work inside it as one span. It is a class and not a generator
    function, because a generator would be slower, and a rank has thousands of spans per second."""

    __slots__ = ("_begin", "_doing", "_watch")

    def __init__(self, watch: "Stopwatch", kind: str, op: str, peer: int | None) -> None:
        self._watch = watch
        self._doing = Doing(kind, op, peer, time.perf_counter())

    def __enter__(self) -> None:
        self._watch.place.doing = self._doing
        self._begin = self._watch.clock.mark()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        # After an exception, no span is recorded. `place` still shows the activity in which the
        # exception was raised.
        if kind is None:
            self._watch.ended(self._doing, self._begin)


class _Marked(NamedTuple):
    """A span whose times may still be unknown, because the device has not finished the work of the
    span."""

    kind: str
    op: str
    begin: Mark
    end: Mark


class Stopwatch:
    """The spans of one rank, measured with the clock of the device that does the work."""

    def __init__(self, rank: int, place: Place, clock: Clock) -> None:
        self.rank = rank
        self.place = place
        self.clock = clock
        self._marked: list[_Marked] = []

    def span(self, kind: str, op: str = "", peer: int | None = None) -> "Spanned":
        """Return a context that records a span. Inside the context, the span is also the activity
        of the host."""
        return Spanned(self, kind, op, peer)

    def ended(self, doing: Doing, begin: Mark) -> None:
        """End a span. The device may not have finished the work of the span yet."""
        end = self.clock.mark()
        self._marked.append(_Marked(doing.kind, doing.op, begin, end))
        self.place.handed_over(doing, begin, end)

    @property
    def spans(self) -> list[Span]:
        """Return all spans, sorted by their ends. Call this method only after the device has
        reached the marks (device events) of all spans."""
        return [
            Span(rank=self.rank, kind=kind, op=op, start_s=begin.at_s(), end_s=end.at_s())
            for kind, op, begin, end in self._marked
        ]

    @property
    def compute_s(self) -> float:
        """Return the seconds that the rank has spent on the ops of the pipeline schedule. Call this
        method only after the device has reached the marks (device events) of all spans."""
        return sum(span.end_s - span.start_s for span in self.spans if span.computes)
