"""Which trainings are compared with which, and the rows of the table that come of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ptdmpi.base.words import counted
from ptdmpi.comm.wires import Wire, wire_named
from ptdmpi.comm.world import World
from ptdmpi.parity import layouts
from ptdmpi.parity.compare import (
    BARS,
    BITWISE,
    Greatest,
    bars_of,
    differences,
    first_other_bit,
)
from ptdmpi.parity.layouts import Case
from ptdmpi.parity.run import Blocks, Training, TrainingTask

STEPS = 20
SHORT_STEPS, SHORT_ROWS = 3, slice(1, 3)  # the first row is one rank

COVERING = "Every layout against one rank, and its bits against p = v = 1"
REPRODUCIBLE = "With run.reproducible = true: bits against d = 1"
MODERN = "Windows, caps, and a key head that all tensor ranks share"
ADAPTED = "Adapters beside a frozen model"
MUON = "Matrices made orthogonal as wholes"
TWICE = "A second run of one layout"


@dataclass(frozen=True)
class Comparison:
    """A case, and the training whose bits it must have."""

    section: str
    case: Case
    base: Case
    attempt: int = 0

    def found(self, compute: str, steps: int) -> TrainingTask:
        return TrainingTask(self.case, compute, steps, self.attempt)

    def expected(self, compute: str, steps: int) -> TrainingTask:
        """The one-rank training of the same model."""
        return TrainingTask(replace(self.case, layout=self.case.layout.reference), compute, steps)

    def same_bits(self, compute: str, steps: int) -> TrainingTask:
        return TrainingTask(self.base, compute, steps)

    def tasks(self, steps: int) -> list[TrainingTask]:
        computes = BARS.keys() | set(BITWISE)
        return [
            *(self.found(compute, steps) for compute in sorted(computes)),
            *(self.expected(compute, steps) for compute in BARS),
            *(self.same_bits(compute, steps) for compute in BITWISE),
        ]


@dataclass(frozen=True)
class Verdict:
    """What a comparison found. `bits` names the first thing that differs, or None; `torn` the
    tensors whose copies on several ranks differ; both by compute type. No bits are compared on a
    wire that is not exact."""

    comparison: Comparison
    differences: dict[str, dict[str, Greatest]]
    bits: dict[str, str | None]
    torn: dict[str, list[str]] = field(default_factory=dict)

    def red(self) -> list[str]:
        """Each bar that is broken, in words."""
        bars = bars_of(self.comparison.case.model)
        found = [
            f"{compute} {name} {one.value:.1e} at {one.where}, bar {bars[compute][name]:.0e}"
            for compute, of_type in self.differences.items()
            for name, one in of_type.items()
            if not one.within(bars[compute][name])
        ]
        found += [f"{compute} bits: {where}" for compute, where in self.bits.items() if where]
        found += [
            f"{compute}: copies of {', '.join(names)} differ"
            for compute, names in self.torn.items()
            if names
        ]
        return found


def comparisons(ranks: int, *, short: bool = False, exact: bool = True) -> list[Comparison]:
    """All comparisons that `ranks` ranks can make; `short`: a few of each kind that need little
    time; `exact` false: none of runs that need a wire which is."""
    covering = layouts.covering_set(ranks)
    reproducible, modern = layouts.reproducible_cases(ranks), layouts.modern_cases(ranks)
    adapted, muon = layouts.adapted_cases(ranks), layouts.muon_cases(ranks)
    # most ranks, and of these most effects: as much as possible can go wrong
    twice = [
        max(covering, key=lambda case: (case.layout.ranks, sum(map(bool, case.effects.values()))))
    ]
    if short:
        covering, reproducible, twice = covering[SHORT_ROWS], reproducible[:1], covering[1:2]
        modern, adapted, muon = modern[:1], adapted[:1], muon[:1]
    if not exact:
        reproducible = []
    sections = {
        COVERING: covering,
        REPRODUCIBLE: reproducible,
        MODERN: modern,
        ADAPTED: adapted,
        MUON: muon,
    }
    return [
        *(
            Comparison(section, case, replace(case, layout=case.layout.base))
            for section, cases in sections.items()
            for case in cases
        ),
        *(Comparison(TWICE, case, case, attempt=1) for case in twice),
    ]


def run(
    world: World,
    wanted: Sequence[Comparison],
    steps: int,
    say: Callable[[str], None] = lambda line: None,
    wire: Wire | None = None,
) -> list[Verdict]:
    """Do the trainings, small layouts side by side, and compare; every rank calls it alike. Bits
    are compared only on a wire that is exact.

    Rank 0 gets the rows and is told by `say` how it goes; the other ranks get no rows. Raises
    InputError if a layout needs more ranks than the world has.
    """
    tasks = list(dict.fromkeys(task for one in wanted for task in one.tasks(steps)))
    wire = wire or wire_named()
    blocks = Blocks(world, wire)
    results: dict[TrainingTask, Training] = {}
    for ranks in sorted({task.case.layout.ranks for task in tasks}):
        alike = [task for task in tasks if task.case.layout.ranks == ranks]
        if world.rank == 0:
            say(
                f"parity: {counted(len(alike), 'training')} of {counted(steps, 'step')} on "
                f"{counted(ranks, 'rank')} each"
            )
            results |= blocks.run(alike, say)
        else:
            blocks.run(alike)
    if world.rank:
        return []
    return [_row(one, steps, results, wire.kind.exact) for one in wanted]


def _row(
    one: Comparison, steps: int, results: dict[TrainingTask, Training], exact: bool
) -> Verdict:
    return Verdict(
        one,
        differences={
            compute: differences(
                results[one.found(compute, steps)], results[one.expected(compute, steps)]
            )
            for compute in BARS
        },
        bits={
            compute: first_other_bit(
                results[one.found(compute, steps)], results[one.same_bits(compute, steps)]
            )
            for compute in (BITWISE if exact else ())
        },
        torn={compute: results[one.found(compute, steps)].torn for compute in (*BARS, "bf16")},
    )
