"""What came of each trial of the torture, and the counts: by fault, by layout, by both."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.faults.layouts import KINDS, kinds_of
from benchmarks.faults.training import Way

COLUMNS = ("survived", "refused", "lost")


@dataclass(frozen=True)
class Outcome:
    """What came of one trial, and in one line why it was lost, if it was."""

    fault: str
    number: int
    way: Way
    came: Literal["survived", "refused", "lost"]
    why: str = ""

    def line(self) -> str:
        """As it is printed when the trial is over."""
        words = f"{self.fault}-{self.number}: {self.way.name}: {self.came}"
        return f"{words}: {self.why}" if self.why else words


def table(outcomes: Sequence[Outcome]) -> str:
    """How many trials survived, were refused and lost: by fault, then by kind of layout; then how
    many trials of each fault met each kind, and how many of these were lost."""
    faults = list(dict.fromkeys(one.fault for one in outcomes))
    lines = [f"{'fault':14} {'trials':>6} {'survived':>8} {'refused':>7} {'lost':>4}"]
    lines += [_row(fault, [one for one in outcomes if one.fault == fault]) for fault in faults]
    lines += [_row("all", outcomes), "", "of these, by layout (some are of two or three kinds):"]
    lines += [_row(kind, [one for one in outcomes if kind in kinds_of(one.way)]) for kind in KINDS]
    lines += ["", f"{'trials/lost':14} " + " ".join(f"{kind:>9}" for kind in KINDS)]
    for fault in faults:
        cells = []
        for kind in KINDS:
            met = [one for one in outcomes if one.fault == fault and kind in kinds_of(one.way)]
            cells.append(f"{len(met)}/{sum(one.came == 'lost' for one in met)}")
        lines.append(f"{fault:14} " + " ".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    count = Counter(one.came for one in outcomes)
    survived, refused, lost = (count[column] for column in COLUMNS)
    return f"{name:14} {len(outcomes):6} {survived:8} {refused:7} {lost:4}"
