"""Which way of another tool is its fastest for a row: found by short trials."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.speed.case import ALONE, Row, Variant, choices
from benchmarks.speed.rounds import PeerTrial
from benchmarks.speed.sides import ANSWER_LIMIT_S, Side, SideFailed, SideTooSlow

WARM_STEPS = 1
TRIAL_MICROBATCHES = 2  # per data rank
GIVE_UP = 2.0  # a way is given up at so many times the time of its tool's fastest,
GIVE_UP_OURS = 3.0  # or of ours,
FIRST_STEP_S = 5.0  # and what a first step may take longer


@dataclass(frozen=True)
class Rival:
    """Who is measured beside this project in a row, and its fastest way.

    `variant` None is this project with `row`'s layout; `at_most` tokens/s are set where no way
    finished, and nothing is measured.
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
    """Those of `tools` that do the row, and what became of others that could, a line each: `absent`
    are not installed, and who fails is left out.
    """
    found: list[Rival] = []
    without: list[str] = []
    rate: float | None = None
    for tool, way in row.peers.items():
        if tool not in tools:
            continue
        if tool == "ptdmpi":
            theirs = row.alone if way == ALONE else replace(row, layout=way)
            found.append(Rival(tool, f"ptdmpi {way}", theirs, None))
            continue
        if tool in absent:
            without.append(f"{way}: not available ({absent[tool]})")
            continue
        if rate is None:
            rate = own_rate(row, trials.end_s) if row.precision == "bf16" else 0.0
        try:
            found.append(trials.rival(row, tool, rate))
        except SideFailed as failure:
            without.append(f"{way}: {failure}")
    return found, without


class Trials:
    """Finds a tool's fastest way for each row. A cast that was hopeless once is not tried again.

    Behind `until_s` (of time.monotonic; a row's caller sets it) no trial begins: the way is the
    fastest so far, or the first, and `untried` counts the others. `end_s` ends all waiting.
    """

    def __init__(self, end_s: float = math.inf) -> None:
        self.hopeless: set[tuple[str, str]] = set()
        self.until_s = self.end_s = end_s
        self.untried = 0

    def rival(self, row: Row, tool: str, tokens_per_s: float) -> Rival:
        """The tool with its fastest way; `tokens_per_s` is our own rate in the trials."""
        best, tried = self.fastest(row, tool, tokens_per_s)
        name = row.peers[tool]
        if best is None:
            at_most = max(trial.tokens_per_s for trial in tried.values())
            return Rival(
                tool, f"{name}, {row.precision}: no way finished", row, None, tried, at_most
            )
        return Rival(tool, f"{name}, {best.name}", row, best, tried)

    def fastest(
        self, row: Row, tool: str, tokens_per_s: float = 0.0
    ) -> tuple[Variant | None, dict[str, PeerTrial]]:
        """The fastest way, decision by decision, and all trials by the names of their ways.

        With our own `tokens_per_s`, ways much slower than it are given up too: None, where no way
        is left (bf16 on a CPU without bf16 instructions).
        """
        decisions = choices(row, tool)
        best = Variant(tool)
        for alternatives in decisions:
            best = replace(best, **alternatives[0])
        tried: dict[Variant, PeerTrial] = {}
        for alternatives in decisions:
            if len(alternatives) == 1 and tokens_per_s == 0.0:
                continue  # nothing to choose, and no way that could be hopeless
            for change in alternatives:
                way = replace(best, **change)
                # where all casts are hopeless, one is tried all the same: it gives the bound
                hopeless = (tool, way.cast) in self.hopeless and change is not alternatives[-1]
                if way in tried or hopeless:
                    continue
                if time.monotonic() > self.until_s:
                    self.untried += 1
                    continue
                rates = [trial.tokens_per_s for trial in tried.values() if trial.finished]
                at_least = max(max(rates, default=0.0) / GIVE_UP, tokens_per_s / GIVE_UP_OURS)
                tried[way] = attempt(short(row), way, at_least, self.end_s)
                if "cast" in change and not tried[way].finished:
                    self.hopeless.add((tool, way.cast))
            ways = [way for change in alternatives if (way := replace(best, **change)) in tried]
            if not ways:
                continue  # for want of time
            best = max(
                (way for way in ways if tried[way].finished),
                key=lambda way: tried[way].tokens_per_s,
                default=None,
            )
            if best is None:
                break
        return best, {way.name: trial for way, trial in tried.items()}


def attempt(row: Row, way: Variant, at_least: float, end_s: float) -> PeerTrial:
    """Measure one way, or give it up where it does not do `at_least` so many tokens/s."""
    tokens = row.case.tokens
    limit_s = ANSWER_LIMIT_S
    if at_least > 0.0:
        limit_s = min(limit_s, FIRST_STEP_S + tokens / at_least)
    with Side(row, way, end_s) as side:
        try:
            side.train(1, limit_s)
            trial = PeerTrial(tokens / side.train(1).time_s, finished=True)
        except SideTooSlow:
            if at_least == 0.0:  # not slower than others, but stuck
                raise
            trial = PeerTrial(tokens / limit_s, finished=False)
    at_most = "" if trial.finished else "given up, at most "
    words = f"  trial of {way.tool}, {way.name}: {at_most}{trial.tokens_per_s:.1f} tokens/s"
    print(words, flush=True)
    return trial


def short(row: Row) -> Row:
    """The row with a smaller batch, for trials."""
    global_size = TRIAL_MICROBATCHES * row.case.micro_size * row.sizes.data
    return replace(row, case=replace(row.case, global_size=global_size))


def own_rate(row: Row, end_s: float = math.inf) -> float:
    """Our tokens per second on the small batch of the trials."""
    with Side(short(row), None, end_s) as ours:
        ours.train(WARM_STEPS)
        return short(row).case.tokens / ours.train(1).time_s
