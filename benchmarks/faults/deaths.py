"""The file that records deaths, and the counts of deaths by kind of run and by fault. A death is
one kill: the benchmark `every_kind` kills processes of runs under `ptdmpi run`."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

IN_A_START = "in a start"  # The fault that kills one rank while the ranks start again.
# The faults, each with its weight in the random choice of the next fault.
FAULTS = {"one rank": 4, "all ranks": 2, IN_A_START: 7, "launcher": 1}


@dataclass(frozen=True)
class Death:
    """One death of a run: the fault that caused it, and the seconds from the death to the next new
    step. `seconds` is None if another death or the end of the run came before a new step."""

    fault: str
    seconds: float | None


@dataclass(frozen=True)
class KilledRun:
    """A run of the kind `kind`, and its deaths. `why` is empty if the run was completed, and its
    losses and last state are the same as in an undisturbed run. Otherwise the run is called lost,
    and `why` is the reason.

    `copies` is True if the ranks continued from copies in memory, and False if they continued from
    checkpoints.
    """

    kind: str
    copies: bool
    deaths: tuple[Death, ...]
    why: str = ""

    def line(self) -> str:
        """Return the line that is printed when the run is over."""
        source = "memory" if self.copies else "checkpoints"
        words = f"{self.kind}, from {source}: {len(self.deaths)} deaths"
        return f"{words}, lost: {self.why}" if self.why else words


def append(path: Path, run: KilledRun) -> None:
    """Append a run and its deaths to the file `path`, as a line of JSON."""
    with open(path, "a") as file:
        file.write(json.dumps(asdict(run)) + "\n")


def runs_in(path: Path) -> list[KilledRun]:
    """Return the runs that `append` has written into the file `path`, or [] if the file does not
    exist."""
    if not path.is_file():
        return []
    runs = []
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        deaths = tuple(Death(**death) for death in fields.pop("deaths"))
        runs.append(KilledRun(**fields, deaths=deaths))
    return runs


def count(runs: Iterable[KilledRun]) -> int:
    """Return the number of deaths in all `runs`."""
    return sum(len(run.deaths) for run in runs)


def table(kinds: Sequence[str], runs: Sequence[KilledRun]) -> str:
    """Return a table with a row for each kind of run. A row has the number of deaths for each
    fault, the number of runs and of lost runs, and the seconds from a death to the next new
    step."""
    names = " ".join(f"{fault:>12}" for fault in FAULTS)
    lines = [f"{'deaths':22} {names} {'all':>5} {'runs':>5} {'lost':>5}  seconds, median"]
    lines += [_row(kind, [run for run in runs if run.kind == kind]) for kind in kinds]
    lines.append(_row("all", runs))
    seconds = _seconds(runs)
    if seconds:
        lines.append(f"death to next new step: {min(seconds):.1f} to {max(seconds):.1f} s")
    from_checkpoints = count(run for run in runs if not run.copies)
    lines.append(f"deaths in runs without copies in memory: {from_checkpoints}")
    return "\n".join(lines)


def _row(name: str, runs: Sequence[KilledRun]) -> str:
    faults = [death.fault for run in runs for death in run.deaths]
    cells = " ".join(f"{faults.count(fault):12}" for fault in FAULTS)
    seconds = _seconds(runs)
    middle = f"{statistics.median(seconds):.1f}" if seconds else "-"
    lost = sum(bool(run.why) for run in runs)
    return f"{name:22} {cells} {len(faults):5} {len(runs):5} {lost:5}  {middle}"


def _seconds(runs: Sequence[KilledRun]) -> list[float]:
    every = (death.seconds for run in runs for death in run.deaths)
    return [seconds for seconds in every if seconds is not None]
