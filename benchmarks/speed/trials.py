"""Which way of another tool is its fastest for a row: found by short trials."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.speed.case import ALONE, Row, Variant, choices
from benchmarks.speed.peers import PeerMissing, install
from benchmarks.speed.rounds import PeerTrial
from benchmarks.speed.sides import ANSWER_LIMIT_S, Side, SideTooSlow

WARM_STEPS = 1
TRIAL_MICROBATCHES = 2  # per data rank
GIVE_UP = 3.0  # a way is given up at so many times the fastest one's time,
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


def rivals(row: Row, tools: Sequence[str], trials: "Trials") -> tuple[list[Rival], list[str]]:
    """Those of `tools` that do the row, and why others that could are not there, a line each.

    Raises SideFailed where a tool is there and fails.
    """
    found: list[Rival] = []
    absent: list[str] = []
    rate: float | None = None
    for tool, way in row.peers.items():
        if tool not in tools:
            continue
        if tool == "ptdmpi":
            theirs = row.alone if way == ALONE else replace(row, layout=way)
            found.append(Rival(tool, f"ptdmpi {way}", theirs, None))
            continue
        try:
            install(tool)
        except PeerMissing as reason:
            absent.append(f"{way}: not available ({reason})")
            continue
        if rate is None:
            rate = own_rate(row) if row.precision == "bf16" else 0.0
        found.append(trials.rival(row, tool, rate))
    return found, absent


class Trials:
    """Finds a tool's fastest way for each row. A cast that was hopeless once is not tried again."""

    def __init__(self) -> None:
        self.hopeless: set[tuple[str, str]] = set()

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
                if way not in tried and not hopeless:
                    rates = [trial.tokens_per_s for trial in tried.values() if trial.finished]
                    best_rate = max(rates, default=tokens_per_s)
                    tried[way] = attempt(short(row), way, best_rate)
                    if "cast" in change and not tried[way].finished:
                        self.hopeless.add((tool, way.cast))
            ways = [replace(best, **change) for change in alternatives]
            best = max(
                (way for way in ways if way in tried and tried[way].finished),
                key=lambda way: tried[way].tokens_per_s,
                default=None,
            )
            if best is None:
                break
        return best, {way.name: trial for way, trial in tried.items()}


def attempt(row: Row, way: Variant, best_tokens_per_s: float) -> PeerTrial:
    """Measure one way, or give it up where it is much slower than the best one so far."""
    tokens = row.case.tokens
    limit_s = ANSWER_LIMIT_S
    if best_tokens_per_s > 0.0:
        limit_s = min(limit_s, FIRST_STEP_S + GIVE_UP * tokens / best_tokens_per_s)
    with Side(row, way) as side:
        try:
            side.train(1, limit_s)
            trial = PeerTrial(tokens / side.train(1).time_s, finished=True)
        except SideTooSlow:
            if best_tokens_per_s == 0.0:  # not slower than others, but stuck
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


def own_rate(row: Row) -> float:
    """Our tokens per second on the small batch of the trials."""
    with Side(short(row), None) as ours:
        ours.train(WARM_STEPS)
        return short(row).case.tokens / ours.train(1).time_s
