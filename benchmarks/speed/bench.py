"""Measure ptdmpi and other trainers alternately, and write results/latest.json.

python -m benchmarks.speed.bench [--rows "t2 single-bf16"] [--peers "torch deepspeed"]
    [--rounds 5] [--minutes 45]
"""

import argparse
import contextlib
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from benchmarks.speed import peers
from benchmarks.speed import rounds as measuring
from benchmarks.speed.case import TOOLS, WEAK, Row, Variant, every, select, select_tools
from benchmarks.speed.rounds import Constants, LeastTimes, Result, Round
from benchmarks.speed.shown import best, picture, scaling
from benchmarks.speed.sides import Side, SideFailed, TimedSteps, TimeIsOver
from benchmarks.speed.trials import WARM_STEPS, Rival, Trials, rivals
from benchmarks.turns import round_of
from ptdmpi.config import InputError

RESULTS = Path(__file__).resolve().parent / "results"
OURS = "ours"
ENDING_S = 60.0  # Seconds that are reserved to end processes that do not end by themselves.
TRIALS_SHARE = 0.4  # Fraction of a row's time that is used for trials.
ROUNDS = 5  # Undisturbed rounds of a row, if `--rounds` is not given.
MORE = 2  # Undisturbed rounds that are added to a row at a time, while time is left.
CLOSE = 0.005  # A row with a smaller spread needs no further rounds.
# The largest allowed relative difference between two trainers' losses in a step. The limit for bf16
# is larger, because two trainers round the same computation at different points.
LOSS_LIMITS = {"fp32": 1e-4, "bf16": 2e-3}


def check_losses(row: Row, name: str, ours: Sequence[float], peer: Sequence[float]) -> None:
    """Raise SideFailed unless the losses of ptdmpi (`ours`) and of the trainer `name` (`peer`)
    agree in every step. Equal losses show that both trainers do the same computation."""
    limit = LOSS_LIMITS[row.precision]
    for step, (a, b) in enumerate(zip(ours, peer, strict=True)):
        if not abs(a - b) <= limit * abs(b):  # in this form, the test also rejects NaN
            raise SideFailed(
                f"row {row.id}: at step {step} the loss is {a:.7g} here and {b:.7g} in {name}: "
                f"they differ by more than {limit:g} relative, so it is not the same computation"
            )


class Contest:
    """All trainers of a row, which run on the same cores and take turns in each round.

    A trainer that fails, or whose losses differ from ptdmpi's, is removed from the row, and the
    reason is added to the attribute `out`. If ptdmpi itself fails, the measurement of the row ends.
    The object waits for a trainer at most until the time `end_s` (of time.monotonic). `wanted` is
    the number of undisturbed rounds that were asked for. `first_s` is the time from the start of
    the trainers to the end of their first round.
    """

    def __init__(self, row: Row, against: Sequence[Rival], end_s: float) -> None:
        self.row = row
        self.against = list(against)
        self.end_s = end_s
        self.sides: dict[str, Side] = {}
        self.losses: dict[str, list[float]] = {}
        self.out: list[str] = []
        self.limits = LeastTimes(math.inf, math.inf)
        self.done: list[dict[str, TimedSteps]] = []
        self.wanted = 0
        self.first_s = 0.0

    def run(self, wanted: int, until_s: float) -> None:
        """Start the trainers, and measure rounds until `wanted` rounds were undisturbed, counting
        rounds of earlier calls. Begin no further round that would end after `until_s` (of
        time.monotonic). Only the first round of a call may end later."""
        self.wanted = wanted
        started_s = time.monotonic()
        before = len(self.done)
        if before:  # removed trainers stay out
            self.against = [rival for rival in self.against if self._takes_part(rival)]
        with contextlib.ExitStack() as stack:
            self._enter(stack, OURS, self.row, None)
            for rival in self.against:
                if rival.at_most is None:
                    self._enter(stack, rival.tool, rival.row, rival.variant)
            try:
                self._turns(0, WARM_STEPS)
                round_s = 0.0
                while len(self.done) == before or (
                    time.monotonic() + round_s < until_s
                    and not measuring.enough(self._rounds(OURS), wanted)
                ):
                    begin_s = time.monotonic()
                    self.done.append(self._turns(len(self.done), 1))
                    self.limits = self.limits.least(self.sides[OURS].limits())
                    round_s = time.monotonic() - begin_s
                    if len(self.done) == before + 1:
                        self.first_s = time.monotonic() - started_s
                    self._report()
            except TimeIsOver:
                if not self.done:
                    raise

    def _enter(
        self, stack: contextlib.ExitStack, name: str, row: Row, variant: Variant | None
    ) -> None:
        with self._or_out(name):
            self.sides[name] = stack.enter_context(Side(row, variant, self.end_s))
            self.losses[name] = []

    @contextlib.contextmanager
    def _or_out(self, name: str) -> Iterator[None]:
        try:
            yield
        except SideFailed as failure:
            if name == OURS:
                raise
            self.sides.pop(name, None)
            self.out.append(f"{self.row.id}, {name}: out: {failure}")
            say(f"  {self.out[-1]}")

    def _turns(self, number: int, count: int) -> dict[str, TimedSteps]:
        """Train `count` steps with each trainer that was not removed from the row, in the order of
        round `number`, and return the results by trainer."""
        timed: dict[str, TimedSteps] = {}

        def train(name: str) -> None:
            with self._or_out(name):
                timed[name] = self.sides[name].train(count)
                self.losses[name] += timed[name].losses

        round_of({name: partial(train, name) for name in self.sides}, number)
        for name in list(self.sides):
            # in weak scaling, the single rank trains a smaller model or batch, so its losses differ
            if self.sides[name].row.case == self.row.case:
                with self._or_out(name):
                    check_losses(self.row, name, self.losses[OURS], self.losses[name])
        return timed

    def _rounds(self, tool: str) -> list[Round]:
        """Return the rounds of ptdmpi and of the trainer `tool`, which may be ptdmpi itself in
        another layout. If no trial of the trainer was finished, its rate in each round is an upper
        bound, which is not measured in the round."""
        bound = None
        case = self.row.case
        for rival in self.against:
            if rival.tool == tool:
                bound = rival.at_most
                case = rival.row.case
        rounds = []
        for timed in self.done:
            ours = self.row.case.tokens / timed[OURS].time_s
            foreign = max(side.foreign_share for side in timed.values())
            rate = bound or case.tokens / timed[tool].time_s
            rounds.append(Round(ours, rate, foreign))
        return rounds

    def _takes_part(self, rival: Rival) -> bool:
        """Return True unless the trainer was removed from the row."""
        return rival.at_most is not None or rival.tool in self.sides

    @property
    def spread(self) -> float:
        """Return the greatest standard error of a ratio to another trainer, relative to the ratio.
        The spread is infinite after a single round, and 0 if the row compares ptdmpi only with
        itself."""
        greatest = 0.0
        for rival in self.against:
            if rival.tool != "ptdmpi" and rival.at_most is None and self._takes_part(rival):
                ratios = [r.ratio for r in measuring.counted(self._rounds(rival.tool), self.wanted)]
                if len(ratios) < 2:
                    return math.inf
                error = statistics.stdev(ratios) / math.sqrt(len(ratios))
                greatest = max(greatest, error / statistics.mean(ratios))
        return greatest

    def _report(self) -> None:
        tools = [rival.tool for rival in self.against if self._takes_part(rival)]
        last = {tool: self._rounds(tool)[-1] for tool in tools}
        ours = self._rounds(OURS)[-1]
        others = ", ".join(
            f"{tool} {each.peer_tokens_per_s:.1f} (ratio {each.ratio:.3f})"
            for tool, each in last.items()
        )
        say(
            f"  round {len(self.done)}: {ours.tokens_per_s:.1f} tokens/s, {others}; other "
            f"processes {ours.foreign_share:.2f} cores" + (", disturbed" if ours.disturbed else "")
        )

    def results(self) -> list[Result]:
        """Return one result for each of the other trainers that were not removed from the row."""
        results = []
        for rival in self.against:
            if not self._takes_part(rival):
                continue
            theirs = self.done[-1].get(rival.tool)
            sample = Constants(
                peak_memory_bytes=self.done[-1][OURS].peak_memory_bytes,
                peer_peak_memory_bytes=theirs.peak_memory_bytes if theirs else None,
                limits=self.limits,
                losses=self.losses[OURS],
                peer_losses=self.losses.get(rival.tool, []),
                peer_trials=rival.tried,
            )
            names = (self.row.layout, self.row.precision, rival.tool, rival.name)
            result = measuring.summarise(
                names, self._rounds(rival.tool), self.wanted, sample, tokens=self.row.case.tokens
            )
            results.append(result)
        return results


def say(text: str) -> None:
    """Print a line, and flush standard output."""
    print(text, flush=True)


def positive(text: str) -> int:
    """Return the value of an option as a number. Raises ArgumentTypeError unless the value is at
    least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def stop(number: int, frame: FrameType | None) -> None:
    """Handle a signal: end the program. The program ends by an exit, because an exit also ends the
    processes of all trainers, which the signal alone would not end."""
    for ending in (signal.SIGINT, signal.SIGTERM):
        # ignore further signals, because a second signal must not interrupt the exit
        signal.signal(ending, signal.SIG_IGN)
    print("bench: stopped; results/latest.json has the rows measured so far", file=sys.stderr)
    sys.exit(128 + number)


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.bench", description=__doc__)
    parser.add_argument(
        "--rows",
        help="ids, layouts or precisions, such as 't2 d2zero3-bf16' [default: five layouts, and "
        "weak scaling on three axes, in fp32 and bf16]",
    )
    parser.add_argument("--peers", help=f"other trainers, some of {' '.join(TOOLS)} [default: all]")
    parser.add_argument(
        "--rounds",
        type=positive,
        help=f"undisturbed rounds of a row [default: {ROUNDS}, and further rounds of the rows with "
        "the widest spread while time is left]",
    )
    parser.add_argument(
        "--minutes", type=positive, default=45, help="time limit for all rows together"
    )
    return parser.parse_args()


def main() -> None:
    """Measure the rows that the command line names, and print a table."""
    options = arguments()
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, stop)
    try:
        rows = select(options.rows)
        tools = select_tools(options.peers)
    except InputError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        sys.exit(2)
    missing: list[str] = []
    if options.rows is None and measuring.machine()["bf16"] == "none":
        # without instructions for bf16, the other trainers' matrix multiplications in bf16 run in
        # scalar code, so the time is better spent on rounds in fp32
        rows = [row for row in rows if row.precision != "bf16"]
        missing.append("bf16: left out on a processor without bf16; `--rows bf16` measures it")
    results, failures = all_rows(rows, tools, options, missing)
    lines = [measuring.table(results), *best.lines(results), *missing, *scaling.lines(results)]
    say("\n".join(lines))
    if failures:
        sys.exit(f"bench: {failures} of {len(rows)} rows failed")


def all_rows(
    rows: Sequence[Row], tools: Sequence[str], options: argparse.Namespace, missing: list[str]
) -> tuple[list[Result], int]:
    """Measure row after row in the available time, and write the results so far after each row.
    Without `--rounds`, time that is left is spent on further rounds (see `more_rounds`).

    Return the results, and the number of rows whose measurement failed. For each row or trainer
    that was not measured, a line is added to `missing`.
    """
    end_s = time.monotonic() + 60 * options.minutes - ENDING_S
    order = [(row.layout, row.precision, tool) for row in every() for tool in row.peers]
    asked = [tool for tool in tools if any(tool in row.peers for row in rows)]
    trials = Trials(end_s)
    absent = peers.absent(asked, end_s)
    contests: list[Contest] = []
    failures = 0

    def write() -> list[Result]:
        results = [result for contest in contests for result in contest.results()]
        measuring.write(RESULTS / "latest.json", results, order)
        picture.draw(RESULTS / "latest.json", picture.PICTURE)
        return results

    for number, row in enumerate(rows):
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            missing.append(f"{row.id}: not reached in {options.minutes} minutes")
            continue
        share = row.work / sum(each.work for each in rows[number:])
        until_s = time.monotonic() + share * left_s
        trials.until_s = time.monotonic() + TRIALS_SHARE * share * left_s
        say(row.id)
        try:
            against, without = rivals(row, tools, absent, trials)
            missing += [f"{row.id}, {text}" for text in without]
            if against:
                wanted = options.rounds or ROUNDS
                if row.layout in WEAK:
                    wanted = min(wanted, 2)
                contest = Contest(row, against, end_s)
                contest.run(wanted, until_s)
                contests.append(contest)
        except TimeIsOver:
            missing.append(f"{row.id}: no round ended in {options.minutes} minutes")
            continue
        except SideFailed as failure:
            failures += 1
            missing.append(str(failure))
            say(f"  {failure}")
            continue
        write()
    if options.rounds is None:
        more_rounds(contests, end_s, write)
    missing += [line for contest in contests for line in contest.out]
    if trials.untried:
        missing.append(f"no time to try {trials.untried} configurations of other trainers")
    return write(), failures


def more_rounds(contests: Sequence[Contest], end_s: float, write: Callable[[], object]) -> None:
    """Measure further rounds until the time `end_s` (of time.monotonic), each time of the row with
    the widest spread (`Contest.spread`). End earlier if no spread exceeds CLOSE. Call `write` after
    each row."""
    left = list(contests)
    while left := [
        each for each in left if each.spread > CLOSE and time.monotonic() + each.first_s < end_s
    ]:
        contest = max(left, key=lambda each: each.spread)
        say(f"{contest.row.id}, again: its spread is the widest")
        try:
            contest.run(contest.wanted + MORE, end_s)
        except (SideFailed, TimeIsOver) as failure:
            say(f"  {failure}")
            left.remove(contest)
        write()


if __name__ == "__main__":
    main()
