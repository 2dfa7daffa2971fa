"""The outcomes of the trials of `torture`, counted by fault, by kind of layout, and by both."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.faults.layouts import KINDS, kinds_of
from benchmarks.faults.training import Way


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial. `came` is "survived" if the run was completed with the right results,
    "refused" if the program ended with a clear error message, and "lost" otherwise. `why` says in
    one line why the run was lost, and is empty for other outcomes."""

    fault: str
    number: int
    way: Way
    came: Literal["survived", "refused", "lost"]
    why: str = ""

    def line(self) -> str:
        """Return the line that is printed when the trial has ended."""
        words = f"{self.fault}-{self.number}: {self.way.name}: {self.came}"
        return f"{words}: {self.why}" if self.why else words


def table(outcomes: Sequence[Outcome]) -> str:
    """Return two tables. The first table counts the trials that survived, were refused and were
    lost, by fault and by kind of layout. The second table has, for each fault with each kind of
    layout, the number of trials and the number of lost trials."""
    by_fault: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_fault.setdefault(outcome.fault, []).append(outcome)
    lines = [f"{'fault':14} {'trials':>6} {'survived':>8} {'refused':>7} {'lost':>4}"]
    lines += [_row(fault, of_fault) for fault, of_fault in by_fault.items()]
    lines += [_row("all", outcomes), "", "of these, by layout (some are of two or three kinds):"]
    lines += [_row(kind, _of_kind(outcomes, kind)) for kind in KINDS]
    lines += ["", f"{'trials/lost':14} " + " ".join(f"{kind:>9}" for kind in KINDS)]
    for fault, of_fault in by_fault.items():
        cells = []
        for kind in KINDS:
            of_kind = _of_kind(of_fault, kind)
            lost = sum(outcome.came == "lost" for outcome in of_kind)
            cells.append(f"{len(of_kind)}/{lost}")
        lines.append(f"{fault:14} " + " ".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def _of_kind(outcomes: Sequence[Outcome], kind: str) -> list[Outcome]:
    return [outcome for outcome in outcomes if kind in kinds_of(outcome.way)]


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    count = Counter(outcome.came for outcome in outcomes)
    return (
        f"{name:14} {len(outcomes):6} {count['survived']:8} {count['refused']:7} {count['lost']:4}"
    )
