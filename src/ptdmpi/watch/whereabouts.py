"""The activity of each rank, the ranks for which each rank waits, and the ranks that cause a stall.

All functions of this module are pure: their results depend only on the reports that rank 0 has. The
thread that receives the reports is in `heartbeat.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ptdmpi.plan.layout.grid import Grid

# A rank sends a report every BEAT_S seconds. If there are many ranks, each rank sends reports less
# often, so that rank 0 reads at most REPORTS_PER_S reports per second. Reading a report takes about
# 20 microseconds, so rank 0 spends at most 0.5 % of one core on reading.
BEAT_S = 1.0
REPORTS_PER_S = 256
# A rank that has not reported for this number of heartbeats is called silent.
SILENT_BEATS = 10
# In a stall, a rank that has missed this number of heartbeats counts as stopped (suspended). Its
# last report is ignored, so it does not count as waiting for another rank. Rank 0 does not wait for
# the stacks of a stopped rank.
MISSED_BEATS = 3
# A busy machine may delay a thread by up to this number of seconds, so a shorter silence of a rank
# is not a sign of an error.
LEAST_SILENCE_S = 5.0
# Maximum number of rows of the table that is printed on the terminal. The table in the file has all
# rows.
TERMINAL_ROWS = 40


class Report(NamedTuple):
    """A rank's report about its own activity.

    A report does not contain points in time, because the clocks of the hosts differ. Instead, a
    report contains ages: the seconds between an event and the sending of the report.
    """

    phase: str
    step: int
    kind: str  # kind of the present span: "forward", "receive", ...
    op: str
    peer: int | None  # the pipeline rank whose message this rank waits for.
    axis: str  # name of the group (such as an axis) whose collective the rank is in, or ""
    collective: str
    age_s: float  # seconds since the rank began the activity (`kind`, `op`).
    # seconds of the rank's own work in a step, the median over the last steps; 0 if unknown
    compute_s: float = 0.0
    # the signals that the rank has received: (number, age in seconds)
    signals: tuple[tuple[int, float], ...] = ()
    # the failure of the rank: (time by the wall clock, error message)
    failure: tuple[float, str] | None = None
    shown: bool = False  # True if this rank has written its stacks.
    leaves: bool = False  # True in the last report of a rank that ends after the training.


@dataclass(frozen=True)
class Seen:
    """A report of a rank, and the time of the report's arrival on rank 0's clock."""

    report: Report
    at_s: float

    def age_s(self, now_s: float) -> float:
        """Return the seconds from the beginning of the rank's activity to `now_s`. The result
        assumes that the activity has not changed since the report."""
        return self.report.age_s + now_s - self.at_s


@dataclass(frozen=True)
class Ranks:
    """The grid of the ranks and the names of their hosts, which do not change."""

    grid: Grid
    hosts: Sequence[str]

    @property
    def beat_s(self) -> float:
        """Return the number of seconds between two reports of a rank. With many ranks it is greater
        than BEAT_S.
        """
        return max(BEAT_S, self.grid.size / REPORTS_PER_S)

    def name(self, rank: int) -> str:
        """Return the name of a rank with its host, such as "rank 3 (node7)"."""
        return f"rank {rank} ({self.hosts[rank]})"

    def silent(self, seen: Seen, now_s: float) -> bool:
        """Return True if the rank has been silent for so long that a warning is due."""
        return now_s - seen.at_s > SILENT_BEATS * self.beat_s and not seen.report.leaves

    def stopped(self, seen: Seen, now_s: float) -> bool:
        """Return True if a rank has missed MISSED_BEATS reports. The search for the cause of a
        stall then treats the rank as suspended.

        A rank that has written its stacks is not treated as suspended: if its reports are late, its
        machine may only be busy.
        """
        missed = now_s - seen.at_s > MISSED_BEATS * self.beat_s
        return missed and not (seen.report.leaves or seen.report.shown)


def idle_s(table: Mapping[int, Seen], now_s: float) -> float:
    """Return the number of seconds since the most recent moment at which some rank began an
    activity."""
    return min(seen.age_s(now_s) for seen in table.values())


def waits_for(rank: int, table: Mapping[int, Seen], ranks: Ranks) -> list[int]:
    """Return the ranks for which `rank` waits. Return an empty list if `rank` is busy with its own
    work.

    If `rank` is in a collective, the result is the list of the ranks in the group that have not
    entered the collective. If all ranks of the group have entered the collective, the result is the
    list of all other ranks in the group.
    """
    report = table[rank].report
    if report.collective:
        group = [peer for peer in ranks.grid.members(rank, report.axis) if peer != rank]
        there = (report.axis, report.collective)
        # Collectives are compared only by their names. So a rank that is already in the next
        # all_reduce seems to be in this all_reduce.
        absent = [
            peer
            for peer in group
            if (table[peer].report.axis, table[peer].report.collective) != there
        ]
        return absent or group
    if report.peer is not None:
        return [ranks.grid.group(rank, "pipeline")[report.peer]]
    return []


def culprits(table: Mapping[int, Seen], ranks: Ranks, now_s: float) -> list[int]:
    """Return the ranks that cause a stall: the stopped ranks, and the ranks that do not wait for
    another rank. The rank with the oldest activity comes first.

    The list is empty if the ranks wait for each other in a circle.
    """
    ranks_at_fault = [
        rank
        for rank, seen in table.items()
        if ranks.stopped(seen, now_s) or not waits_for(rank, table, ranks)
    ]
    return sorted(ranks_at_fault, key=lambda rank: (-round(table[rank].age_s(now_s)), rank))


def describe(report: Report) -> str:
    """Return the activity in a report as text, such as "F2.0", "waits for B3.1" or "F2.0, in
    all_reduce (tensor)"."""
    words = {"receive": f"waits for {report.op}", "send": "finishing sends"}
    work = words.get(report.kind, report.op or report.kind or report.phase)
    if report.phase not in ("training", work):
        work = f"{report.phase}: {work}"
    if report.collective:
        work += f", in {report.collective} ({report.axis})"
    return work


def rows(table: Mapping[int, Seen], ranks: Ranks, now_s: float, first: Sequence[int]) -> list[str]:
    """Return the lines of the table that shows the activity of each rank: one line of headings, and
    one line for each rank. The ranks in `first` come first."""
    order = [*first, *sorted(set(table) - set(first))]
    cells = [("rank", "host", "step", "doing", "for", "needs", "")]
    for rank in order:
        seen = table[rank]
        needs = waits_for(rank, table, ranks)
        text = ", ".join(map(str, needs[:4]))
        if len(needs) > 4:
            text += f" and {len(needs) - 4} more"
        note = "<-- here" if rank in first else ""
        if ranks.stopped(seen, now_s):
            note += f" (no report for {now_s - seen.at_s:.0f} s)"
        if seen.report.failure:
            note += f" ({seen.report.failure[1]})"
        age = f"{seen.age_s(now_s):.0f} s"
        step = str(seen.report.step)
        work = describe(seen.report)
        cells.append((str(rank), ranks.hosts[rank], step, work, age, text, note.strip()))
    widths = [max(len(row[column]) for row in cells) for column in range(6)]
    return [
        "  ".join(
            [*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[6]]
        ).rstrip()
        for row in cells
    ]
