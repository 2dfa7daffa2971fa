"""Detection of slow ranks: ranks that compute more slowly than other ranks with the same work."""

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

# a rank is slow if the time of its own work is more than SLOW_FACTOR times the median time of its
# peers
SLOW_FACTOR = 1.3
SLOW_EVERY_S = 300.0  # minimum number of seconds between two printed lines about slow ranks
MOST_PRINTED = 8


class SlowRanks:
    """The object on rank 0 that searches for slow ranks. All ranks report the time that they need
    for their own work, and this object compares these times.

    If `shares_cores` is True, a host has more threads than cores, and no rank is reported as slow,
    because the operating system then slows down different ranks at different times.
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
        """Return the slow ranks, for the record of `step`. Also print a line about them, but at
        most once per SLOW_EVERY_S seconds."""
        # compare once in COMPUTE_STEPS steps, so that two consecutive medians of COMPUTE_STEPS
        # steps have no step in common
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
            self.say(f"slow compared with ranks that do the same work: {text}")
        return [
            {"rank": rank, "host": self.ranks.hosts[rank], "factor": round(factor, 2)}
            for rank, factor in slow
        ]


def slow_ranks(
    compute_s: Mapping[int, float], grid: Grid, threshold: float
) -> list[tuple[int, float]]:
    """Return (rank, factor) for each slow rank, the slowest first. The factor is the time of the
    rank divided by the median time of its peers.

    `compute_s` maps each rank to the seconds of the rank's own work in a step. The peers of a rank
    are all ranks at the same position of the pipeline axis. A rank is slow if its factor is greater
    than `threshold`. The median is the lower median, so that in a pair of ranks the slower one is
    compared with the faster one.
    """
    peers: dict[int, list[int]] = defaultdict(list)
    for rank in compute_s:
        peers[grid.coordinates(rank)["pipeline"]].append(rank)
    slow: list[tuple[int, float]] = []
    for group in peers.values():
        # use the median and not the mean, because a slow rank would increase the mean
        usual_s = statistics.median_low(compute_s[rank] for rank in group)
        slow += [
            (rank, compute_s[rank] / usual_s)
            for rank in group
            if compute_s[rank] > threshold * usual_s
        ]
    return sorted(slow, key=lambda pair: -pair[1])
