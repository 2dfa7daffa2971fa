"""Comparisons of training runs, and their verdicts. A verdict is a row of the table of results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

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
from ptdmpi.parity.mixtures import Choices, MixtureModel, mixture_cases
from ptdmpi.parity.run import Blocks, Training, TrainingTask, train

STEPS = 20
SHORT_STEPS = 3
SHORT_ROWS = slice(1, 3)  # leave out the first case, because its layout has only one rank

COVERING = "Every layout against one rank, and its bits against p = v = 1"
REPRODUCIBLE = "With run.reproducible = true: bits against d = 1"
MODERN = "Windows, caps, and a key head that all tensor ranks share"
ADAPTED = "Adapters next to a frozen model"
MUON = "Matrices that Muon orthogonalizes as a whole"
EXPERTS = "Experts on several ranks"
TWICE = "A second run of one layout"


@dataclass(frozen=True)
class Comparison:
    """A comparison of a case with another case, `base`. The results of both training runs must have
    the same bits.

    If the comparison repeats the same training run, `attempt` is the number of the repetition,
    which is above 0. In all other comparisons `attempt` is 0.
    """

    section: str
    case: Case
    base: Case
    attempt: int = 0

    def compared(self, compute: str, steps: int) -> TrainingTask:
        """Return the training run of the case itself."""
        return TrainingTask(self.case, compute, steps, self.attempt)

    def expected(self, compute: str, steps: int) -> TrainingTask:
        """Return the reference of the case: the same model trained on one rank."""
        return TrainingTask(self.case, compute, steps).reference

    def same_bits(self, compute: str, steps: int) -> TrainingTask:
        """Return the training run of `base`, which must have the same bits as the run of the
        case."""
        return TrainingTask(self.base, compute, steps)

    def tasks(self, steps: int) -> list[TrainingTask]:
        """Return all training runs that the comparison needs."""
        computes = BARS.keys() | set(BITWISE)
        return [
            *(self.compared(compute, steps) for compute in sorted(computes)),
            *(self.expected(compute, steps) for compute in BARS),
            *(self.same_bits(compute, steps) for compute in BITWISE),
        ]


@dataclass(frozen=True)
class Verdict:
    """The result of one comparison.

    `differences`, `bits`, `torn` and `flips` map a compute type to results. `differences` has the
    greatest difference from the training run on one rank, by kind of value ("loss", "norm",
    "gradients", "parameters"). `bits` has the first value whose bits differ, or None. `torn` has
    the tensors whose copies on several ranks differ. If the model has experts, `flips` has the
    number of choices of experts that differ from the training run on one rank. In float32, the
    compared run does not use its own choices, but those of the run on one rank. Bits are not
    compared on a transport that is not exact.
    """

    comparison: Comparison
    differences: dict[str, dict[str, Greatest]]
    bits: dict[str, str | None]
    torn: dict[str, list[str]] = field(default_factory=dict)
    flips: dict[str, int] = field(default_factory=dict)

    def red(self) -> list[str]:
        """Return a text for each tolerance that is exceeded and for each other fault."""
        bars = bars_of(self.comparison.case.model)
        faults = []
        for compute, of_type in self.differences.items():
            for name, greatest in of_type.items():
                bar = bars[compute][name]
                if not greatest.within(bar):
                    value = f"{greatest.value:.1e} at {greatest.where}"
                    faults.append(f"{compute} {name} {value}, bar {bar:.0e}")
        for compute, where in self.bits.items():
            if where:
                faults.append(f"{compute} bits: {where}")
        for compute, names in self.torn.items():
            if names:
                faults.append(f"{compute}: copies of {', '.join(names)} differ")
        if flips := self.flips.get("fp64"):
            verb = "differs" if flips == 1 else "differ"
            faults.append(f"fp64: {counted(flips, 'choice')} of experts {verb}")
        return faults


def comparisons(ranks: int, *, short: bool = False, exact: bool = True) -> list[Comparison]:
    """Return all comparisons that `ranks` ranks can make.

    If `short` is True, return only a few comparisons of each section, which take little time. If
    `exact` is False, leave out the comparisons of reproducible runs, which require equal bits.
    """
    covering = layouts.covering_set(ranks)
    sections = {
        COVERING: covering,
        REPRODUCIBLE: layouts.reproducible_cases(ranks) if exact else [],
        MODERN: layouts.modern_cases(ranks),
        ADAPTED: layouts.adapted_cases(ranks),
        MUON: layouts.muon_cases(ranks),
        EXPERTS: mixture_cases(ranks),
    }
    # Repeat the layout with the most ranks, because such layouts find the most faults. Among these
    # layouts, repeat the layout in which the most settings have an effect.
    twice = [
        max(covering, key=lambda case: (case.layout.ranks, sum(map(bool, case.effects.values()))))
    ]
    if short:
        sections = {section: cases[:1] for section, cases in sections.items()}
        sections[COVERING] = covering[SHORT_ROWS]
        twice = covering[1:2]
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
    *,
    say: Callable[[str], None] = lambda line: None,
    wire: Wire | None = None,
) -> list[Verdict]:
    """Do the training runs for the comparisons `wanted`, and compare their results. Small layouts
    are trained at the same time on different ranks.

    Every rank calls this function with the same arguments. Return a verdict for each comparison on
    rank 0, [] on other ranks. `say` is called with lines about the progress on rank 0. Bits are
    compared only on an exact transport. No layout may need more ranks than the world has.
    """
    tasks = list(dict.fromkeys(task for comparison in wanted for task in comparison.tasks(steps)))
    wire = wire or wire_named()
    blocks = Blocks(world, wire)
    results: dict[TrainingTask, Training] = {}
    choices: dict[TrainingTask, Choices] = {}
    # Some runs compare the experts that their routers choose with the experts that another run has
    # chosen. Such a run must come after that other run.
    for watches, ranks in sorted({(t.watches_choices, t.case.layout.ranks) for t in tasks}):
        if watches and not choices:
            made = {task: training.choices for task, training in results.items()}
            choices = world.control.bcast(made, root=0)
        alike = [t for t in tasks if (t.watches_choices, t.case.layout.ranks) == (watches, ranks)]
        work = partial(train, known=choices)
        if world.rank == 0:
            say(
                f"parity: {counted(len(alike), 'training')} of {counted(steps, 'step')} on "
                f"{counted(ranks, 'rank')} each"
            )
            results |= blocks.run(alike, say, work=work)
        else:
            blocks.run(alike, work=work)
    if world.rank:
        return []
    return [_verdict(comparison, steps, results, wire.kind.exact) for comparison in wanted]


def _verdict(
    comparison: Comparison, steps: int, results: dict[TrainingTask, Training], exact: bool
) -> Verdict:
    """Return the verdict of a comparison. If `exact` is True, the bits of the results are compared,
    too."""
    mine = {compute: results[comparison.compared(compute, steps)] for compute in (*BARS, *BITWISE)}
    bitwise = BITWISE if exact else ()
    is_mixture = isinstance(comparison.case.model, MixtureModel)
    return Verdict(
        comparison,
        differences={
            compute: differences(mine[compute], results[comparison.expected(compute, steps)])
            for compute in BARS
        },
        bits={
            compute: first_other_bit(mine[compute], results[comparison.same_bits(compute, steps)])
            for compute in bitwise
        },
        torn={compute: mine[compute].torn for compute in (*BARS, "bf16")},
        flips={compute: mine[compute].flips for compute in BARS} if is_mixture else {},
    )
