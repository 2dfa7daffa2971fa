"""Who is where and who waits for whom: reports of all ranks -> the rank that holds up the others.

Pure functions of what rank 0 has heard; the thread that hears it is in `heartbeat.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ptdmpi.plan.layout.grid import Grid

# A rank reports this often; where they are many less often, so that rank 0 reads at most so many a
# second: at some 20 microseconds each, half a percent of one core.
BEAT_S = 1.0
REPORTS_PER_S = 256
# A rank that has not been heard of for so many of its heartbeats is called silent.
SILENT_BEATS = 10
# Once nobody gets on, a rank that has missed so many is stopped: it waits for nobody, whatever it
# said last, and nobody waits for its stacks.
MISSED_BEATS = 3
# Shorter silences say nothing: a busy machine may keep a thread waiting.
LEAST_SILENCE_S = 5.0
# The terminal gets so many rows; the file gets all.
TERMINAL_ROWS = 40


class Report(NamedTuple):
    """What a rank tells of itself. Ages are of the moment when it was sent: clocks of two hosts
    differ."""

    phase: str
    step: int
    kind: str  # of span: "forward", "receive", ...
    op: str
    peer: int | None  # pipeline rank whose message is waited for
    axis: str  # axis, or other group, whose collective the rank is in; "" if it is in none
    collective: str
    age_s: float  # since `kind` and `op` began
    compute_s: float = 0.0  # own work of a step, median of the last ones; 0: not known yet
    signals: tuple[tuple[int, float], ...] = ()  # (number, age)
    failure: tuple[float, str] | None = None  # (time of the wall clock, what was raised)
    shown: bool = False  # this rank has written its stacks
    leaves: bool = False  # the last report of an orderly end


@dataclass(frozen=True)
class Seen:
    """A report and when it came, on rank 0's clock."""

    report: Report
    at_s: float

    def age_s(self, now_s: float) -> float:
        return self.report.age_s + now_s - self.at_s


@dataclass(frozen=True)
class Ranks:
    """What does not change: the grid and each rank's host."""

    grid: Grid
    hosts: Sequence[str]

    @property
    def beat_s(self) -> float:
        """A rank reports this often: less often where there are many."""
        return max(BEAT_S, self.grid.size / REPORTS_PER_S)

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.hosts[rank]})"

    def silent(self, seen: Seen, now_s: float) -> bool:
        return now_s - seen.at_s > SILENT_BEATS * self.beat_s and not seen.report.leaves

    def stopped(self, seen: Seen, now_s: float) -> bool:
        """Whether a rank is missed, when ranks are asked what holds them up. Not one that has
        written its stacks: its machine may be busy."""
        missed = now_s - seen.at_s > MISSED_BEATS * self.beat_s
        return missed and not (seen.report.leaves or seen.report.shown)


def idle_s(table: Mapping[int, Seen], now_s: float) -> float:
    """Seconds since any rank has begun anything."""
    return min(seen.age_s(now_s) for seen in table.values())


def waits_for(rank: int, table: Mapping[int, Seen], ranks: Ranks) -> list[int]:
    """The ranks without which `rank` does not get on; none if it is busy with its own work.

    In a collective these are the ranks of the axis that are not in it.
    """
    report = table[rank].report
    if report.collective:
        group = [peer for peer in ranks.grid.members(rank, report.axis) if peer != rank]
        there = (report.axis, report.collective)
        # told apart by name alone: a rank that is in its next all_reduce counts as there
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
    """The ranks that wait for nobody, or are not heard of, the one that has been so for longest
    first. Empty if the ranks wait in a circle."""
    found = [
        rank
        for rank, seen in table.items()
        if ranks.stopped(seen, now_s) or not waits_for(rank, table, ranks)
    ]
    return sorted(found, key=lambda rank: (-round(table[rank].age_s(now_s)), rank))


def describe(report: Report) -> str:
    """Such as "F2.0", "waits for B3.1", "F2.0, in all_reduce (tensor)"."""
    words = {"receive": f"waits for {report.op}", "send": "finishing sends"}
    what = words.get(report.kind, report.op or report.kind or report.phase)
    if report.phase not in ("training", what):
        what = f"{report.phase}: {what}"
    if report.collective:
        what += f", in {report.collective} ({report.axis})"
    return what


def rows(table: Mapping[int, Seen], ranks: Ranks, now_s: float, first: Sequence[int]) -> list[str]:
    """One line for each rank, `first` first, below a line of headings."""
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
            note += f" (not heard of for {now_s - seen.at_s:.0f} s)"
        if seen.report.failure:
            note += f" ({seen.report.failure[1]})"
        age = f"{seen.age_s(now_s):.0f} s"
        step, doing = str(seen.report.step), describe(seen.report)
        cells.append((str(rank), ranks.hosts[rank], step, doing, age, text, note.strip()))
    widths = [max(len(row[column]) for row in cells) for column in range(6)]
    return [
        "  ".join(
            [*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[6]]
        ).rstrip()
        for row in cells
    ]
