"""Spans of what a rank does outside the schedule."""

import contextlib
import time
from collections.abc import Iterator

from ptdmpi.plan.simulate import Span


class Stopwatch:
    """Collects the spans of one rank; times are of the host's monotonic clock."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.spans: list[Span] = []

    @contextlib.contextmanager
    def span(self, kind: str, op: str = "") -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.spans.append(Span(self.rank, kind, op, start, time.perf_counter()))
