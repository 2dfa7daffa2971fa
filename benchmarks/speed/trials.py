"""The choice of the fastest variant of another trainer for a row, by short trials."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.speed.case import ALONE, Row, Variant, choices
from benchmarks.speed.rounds import PeerTrial
from benchmarks.speed.sides import ANSWER_LIMIT_S, Side, SideFailed, SideTooSlow

WARM_STEPS = 1
TRIAL_MICROBATCHES = 2  # Number of microbatches per data rank in a trial.
# Stop the trial of a variant that takes this many times as long as the fastest variant.
GIVE_UP = 2.0
GIVE_UP_OURS = 3.0  # Stop the trial of a variant that takes this many times as long as ptdmpi.
FIRST_STEP_S = 5.0  # Seconds that are added to the time limit of the first step, which is slow.


@dataclass(frozen=True)
class Rival:
    """A trainer that is compared with ptdmpi in a row, and its fastest variant.

    If `variant` is None, the trainer is ptdmpi itself, with the layout of `row`. If no variant has
    finished its trial, `at_most` is an upper bound of its tokens per second, and the trainer is not
    measured.
    """

    tool: str
    name: str
    row: Row
    variant: Variant | None
    tried: dict[str, PeerTrial] = field(default_factory=dict)
    at_most: float | None = None


def rivals(
    row: Row, tools: Sequence[str], absent: Mapping[str, str], trials: "Trials"
) -> tuple[list[Rival], list[str]]:
    """Return the trainers among `tools` that the row compares with ptdmpi, and a line of text for
    each trainer that is left out. A trainer is left out if it is not installed (`absent` has the
    reason) or if it fails.
    """
    against: list[Rival] = []
    without: list[str] = []
    rate: float | None = None
    for tool, way in row.peers.items():
        if tool not in tools:
            continue
        if tool == "ptdmpi":
            theirs = row.alone if way == ALONE else replace(row, layout=way)
            against.append(Rival(tool, f"ptdmpi {way}", theirs, None))
            continue
        if tool in absent:
            without.append(f"{way}: not available ({absent[tool]})")
            continue
        if rate is None:
            rate = own_rate(row, trials.end_s) if row.precision == "bf16" else 0.0
        try:
            against.append(trials.rival(row, tool, rate))
        except SideFailed as failure:
            without.append(f"{way}: {failure}")
    return against, without


class Trials:
    """The trials of the variants of all tools, for all rows. If the trial of a variant was stopped
    early in one row, its `cast` (its way to compute in bf16) is not tried with the same tool in
    other rows.

    After the time `until_s` (of time.monotonic), which is set for each row, no new trial begins.
    The fastest variant so far is then used, or the first variant if none was tried. `untried`
    counts the variants that were not tried. The object waits for a trainer at most until the time
    `end_s`.
    """

    def __init__(self, end_s: float = math.inf) -> None:
        self.hopeless: set[tuple[str, str]] = set()
        self.until_s = self.end_s = end_s
        self.untried = 0

    def rival(self, row: Row, tool: str, tokens_per_s: float) -> Rival:
        """Return the tool, with its fastest variant for this row, as a `Rival`. `tokens_per_s` is
        ptdmpi's rate in the trials."""
        best, tried = self.fastest(row, tool, tokens_per_s)
        name = row.peers[tool]
        if best is None:
            at_most = max(trial.tokens_per_s for trial in tried.values())
            return Rival(
                tool=tool,
                name=f"{name}, {row.precision}: no way finished",
                row=row,
                variant=None,
                tried=tried,
                at_most=at_most,
            )
        return Rival(tool=tool, name=f"{name}, {best.name}", row=row, variant=best, tried=tried)

    def fastest(
        self, row: Row, tool: str, tokens_per_s: float = 0.0
    ) -> tuple[Variant | None, dict[str, PeerTrial]]:
        """Return the fastest variant, and all trials by the names of their variants. The decisions
        that `choices` lists (such as how to cast to bf16) are made one after another.

        If `tokens_per_s`, ptdmpi's rate, is above 0, trials of variants that are much slower than
        ptdmpi are stopped early, too. The variant is None if the trials of all variants were
        stopped early (for example in bf16 on a CPU without bf16 instructions).
        """
        decisions = choices(row, tool)
        best = Variant(tool)
        for alternatives in decisions:
            best = replace(best, **alternatives[0])
        tried: dict[Variant, PeerTrial] = {}
        for alternatives in decisions:
            if len(alternatives) == 1 and tokens_per_s == 0.0:
                continue  # a decision with a single alternative needs no trial
            ways = [replace(best, **change) for change in alternatives]
            for way in ways:
                # if no cast has finished its trial in other rows, try the last cast nevertheless,
                # because its trial gives the upper bound `Rival.at_most`
                hopeless = (tool, way.cast) in self.hopeless and way is not ways[-1]
                if way not in tried and not hopeless:
                    self._try(row, way, tried, tokens_per_s)
                if "cast" in alternatives[0] and way in tried and not tried[way].finished:
                    self.hopeless.add((tool, way.cast))
            if not any(way in tried for way in ways):
                continue  # there was no time left for a trial
            finished = [way for way in ways if way in tried and tried[way].finished]
            best = max(finished, key=lambda way: tried[way].tokens_per_s, default=None)
            if best is None:
                break
        return best, {way.name: trial for way, trial in tried.items()}

    def _try(
        self, row: Row, way: Variant, tried: dict[Variant, PeerTrial], tokens_per_s: float
    ) -> None:
        """Try the variant `way` and add the trial to `tried`, if there is time for it.
        `tokens_per_s` is ptdmpi's rate."""
        if time.monotonic() > self.until_s:
            self.untried += 1
            return
        rates = [trial.tokens_per_s for trial in tried.values() if trial.finished]
        at_least = max(max(rates, default=0.0) / GIVE_UP, tokens_per_s / GIVE_UP_OURS)
        tried[way] = attempt(short(row), way, at_least, self.end_s)


def attempt(row: Row, way: Variant, at_least: float, end_s: float) -> PeerTrial:
    """Try the variant `way` of a tool on a row, and return the trial. The measurement ends early if
    the tool does not reach `at_least` tokens per second."""
    tokens = row.case.tokens
    limit_s = ANSWER_LIMIT_S
    if at_least > 0.0:
        limit_s = min(limit_s, FIRST_STEP_S + tokens / at_least)
    with Side(row, way, end_s) as side:
        try:
            side.train(1, limit_s)
            trial = PeerTrial(tokens / side.train(1).time_s, finished=True)
        except SideTooSlow:
            if at_least == 0.0:  # without a minimum rate, only a tool that hangs can be too slow
                raise
            trial = PeerTrial(tokens / limit_s, finished=False)
    at_most = "" if trial.finished else "given up, at most "
    words = f"  trial of {way.tool}, {way.name}: {at_most}{trial.tokens_per_s:.1f} tokens/s"
    print(words, flush=True)
    return trial


def short(row: Row) -> Row:
    """Return a copy of the row with a smaller batch, which is used for trials."""
    global_size = TRIAL_MICROBATCHES * row.case.micro_size * row.sizes.data
    return replace(row, case=replace(row.case, global_size=global_size))


def own_rate(row: Row, end_s: float = math.inf) -> float:
    """Return ptdmpi's tokens per second on the small batch of the trials."""
    with Side(short(row), None, end_s) as ours:
        ours.train(WARM_STEPS)
        return short(row).case.tokens / ours.train(1).time_s
