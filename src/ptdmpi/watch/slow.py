"""Ranks that compute slowly, compared with ranks that do the same work."""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from ptdmpi.plan.layout.grid import Grid
from ptdmpi.watch.heartbeat import Judge
from ptdmpi.watch.stopwatch import COMPUTE_STEPS
from ptdmpi.watch.whereabouts import Ranks

SLOW_FACTOR = 1.3  # a rank is slow if its own work takes so many times as long as its peers'
SLOW_EVERY_S = 300.0  # the least time between two reports of slow ranks
MOST_PRINTED = 8


class SlowRanks:
    """Rank 0's comparison of the own work of all ranks, as its judge has heard of it.

    With `shares_cores` no rank is called slow: with more ranks than cores, the operating system's
    scheduler slows down one rank after the other.
    """

    def __init__(
        self, judge: Judge, ranks: Ranks, shares_cores: bool, say: Callable[[str], None]
    ) -> None:
        self.judge = judge
        self.ranks = ranks
        self.shares_cores = shares_cores
        self.say = say
        self._said_s = -math.inf

    def after(self, step: int) -> list[dict[str, Any]]:
        """Return the slow ranks for the record of `step`; say so every SLOW_EVERY_S at most."""
        # a median of COMPUTE_STEPS steps is new only after as many further steps
        if step % COMPUTE_STEPS or self.shares_cores:
            return []
        slow = slow_ranks(self.judge.compute_s(), self.ranks.grid, SLOW_FACTOR)
        now_s = time.monotonic()
        if slow and now_s - self._said_s >= SLOW_EVERY_S:
            self._said_s = now_s
            text = ", ".join(
                f"{self.ranks.name(rank)} {factor:.2f} times"
                for rank, factor in slow[:MOST_PRINTED]
            )
            self.say(f"slow in computing, against ranks with the same work: {text}")
        return [
            {"rank": rank, "host": self.ranks.hosts[rank], "factor": round(factor, 2)}
            for rank, factor in slow
        ]


def slow_ranks(
    compute_s: Mapping[int, float], grid: Grid, threshold: float
) -> list[tuple[int, float]]:
    """Return (rank, factor) of the slow ranks, slowest first.

    `compute_s`: rank -> seconds of its own work in a step. A slow rank takes more than `threshold`
    times the median of its peers, the ranks at the same place on the pipeline axis. It is the lower
    median, so that the slower of two ranks is compared with the other one.
    """
    peers: dict[int, list[int]] = defaultdict(list)
    for rank in compute_s:
        peers[grid.coordinates(rank)["pipeline"]].append(rank)
    slow: list[tuple[int, float]] = []
    for group in peers.values():
        # a slow rank would raise the mean that it is compared with
        usual_s = statistics.median_low(compute_s[rank] for rank in group)
        slow += [
            (rank, compute_s[rank] / usual_s)
            for rank in group
            if compute_s[rank] > threshold * usual_s
        ]
    return sorted(slow, key=lambda pair: -pair[1])
