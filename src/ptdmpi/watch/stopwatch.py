"""Spans of what a rank does, and the place where it is, for its heartbeat to tell."""

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

from ptdmpi.plan.schedule.simulate import Span


class Doing(NamedTuple):
    """`kind` and `op` as in a Span; `peer`: the pipeline rank whose message is waited for."""

    kind: str
    op: str
    peer: int | None
    since_s: float  # of time.perf_counter


class Place:
    """Where a rank is: written by the thread that trains, read by the heartbeat's.

    `doing` is replaced as a whole, so a reader never sees half of it. `phase` is "start-up",
    "training", "validation", "saving" or "ending"; `step` counts from 1.
    """

    def __init__(self) -> None:
        self.phase = "start-up"
        self.step = 0
        self.doing = Doing("", "", None, time.perf_counter())

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.doing = Doing("", "", None, time.perf_counter())


class Stopwatch:
    """Collects the spans of one rank; times are of the host's monotonic clock."""

    def __init__(self, rank: int, place: Place) -> None:
        self.rank = rank
        self.place = place
        self.spans: list[Span] = []

    @contextlib.contextmanager
    def span(self, kind: str, op: str = "", peer: int | None = None) -> Iterator[None]:
        start = time.perf_counter()
        self.place.doing = Doing(kind, op, peer, start)
        yield
        self.spans.append(Span(self.rank, kind, op, start, time.perf_counter()))
