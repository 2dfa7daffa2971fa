"""Ranks that compute slowly: compared with those that do the same work, and told at times."""

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

# A rank is slow if its own work takes so many times that of the others; told once in a while.
SLOW_FACTOR = 1.3
SLOW_EVERY_S = 300.0
TOLD_RANKS = 8


class SlowRanks:
    """Rank 0's look at everybody's own work, as the judge has heard of it.

    With `shares_cores` nobody is called slow: where ranks are more than cores, the system's
    scheduler makes them slow, now this one and now that.
    """

    def __init__(
        self, judge: Judge, ranks: Ranks, shares_cores: bool, say: Callable[[str], None]
    ) -> None:
        self.judge, self.ranks, self.shares_cores, self.say = judge, ranks, shares_cores, say
        self._told_s = -math.inf

    def after(self, step: int) -> list[dict[str, Any]]:
        """Those that are slow after `step`, for its record; also told, once in a while."""
        # a median over COMPUTE_STEPS steps tells nothing new before as many more have gone by
        if step % COMPUTE_STEPS or self.shares_cores:
            return []
        found = slow_ranks(self.judge.compute_s(), self.ranks.grid, SLOW_FACTOR)
        now_s = time.monotonic()
        if found and now_s - self._told_s >= SLOW_EVERY_S:
            self._told_s = now_s
            text = ", ".join(
                f"{self.ranks.name(rank)} {factor:.2f} times" for rank, factor in found[:TOLD_RANKS]
            )
            self.say(f"slow in computing, against ranks with the same work: {text}")
        return [
            {"rank": rank, "host": self.ranks.hosts[rank], "factor": round(factor, 2)}
            for rank, factor in found
        ]


def slow_ranks(
    compute_s: Mapping[int, float], grid: Grid, threshold: float
) -> list[tuple[int, float]]:
    """(rank, factor) of the ranks whose own work takes more than `threshold` times the median of
    those that do the same work (one place on the pipeline axis), slowest first.

    The lower median: of two ranks the slower one is compared with the other.
    """
    peers: dict[int, list[int]] = defaultdict(list)
    for rank in compute_s:
        peers[grid.coordinates(rank)["pipeline"]].append(rank)
    found = []
    for group in peers.values():
        # a mean would rise with the slow rank, which is held against it
        usual_s = statistics.median_low(compute_s[rank] for rank in group)
        found += [
            (rank, compute_s[rank] / usual_s)
            for rank in group
            if compute_s[rank] > threshold * usual_s
        ]
    return sorted(found, key=lambda pair: -pair[1])
