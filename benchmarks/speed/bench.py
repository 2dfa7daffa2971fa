"""Measure this project and other trainers in turn, and write results/latest.json.

python -m benchmarks.speed.bench [--rows "t2 single-bf16"] [--peers "torch deepspeed"]
    [--rounds 5] [--steps 1] [--minutes 45] [--profile ROW]
"""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.speed import rounds as measuring
from benchmarks.speed.case import TOOLS, Row, select, select_tools
from benchmarks.speed.rounds import Constants, Result, Round
from benchmarks.speed.shown import picture, scaling
from benchmarks.speed.sides import Side, SideFailed, TimedSteps
from benchmarks.speed.trials import WARM_STEPS, Rival, Trials, own_rate, rivals
from benchmarks.turns import round_of
from ptdmpi.config import InputError

RESULTS = Path(__file__).resolve().parent / "results"
OURS = "ours"
# Greatest relative difference between two sides' losses in each step. The same computation in bf16
# rounds at other places in the two sides.
LOSS_LIMITS = {"fp32": 1e-4, "bf16": 2e-3}


def check_losses(row: Row, name: str, ours: Sequence[float], peer: Sequence[float]) -> None:
    """Raises SideFailed unless both sides compute the same thing."""
    limit = LOSS_LIMITS[row.precision]
    for step, (a, b) in enumerate(zip(ours, peer, strict=True)):
        if not abs(a - b) <= limit * abs(b):  # not a number is no agreement either
            raise SideFailed(
                f"row {row.id}: at step {step} the loss is {a:.7g} here and {b:.7g} in {name}: "
                f"they differ by more than {limit:g} relative, so it is not the same computation"
            )


def measure(
    row: Row, wanted: int, steps: int, against: Sequence[Rival], until_s: float
) -> list[Result]:
    """Have all sides take turns, repeating what was disturbed: a result for each rival. From
    `until_s` on (of time.monotonic) no round but the first begins."""
    with contextlib.ExitStack() as stack:
        sides = {OURS: stack.enter_context(Side(row, None))}
        for rival in against:
            if rival.at_most is None:
                sides[rival.tool] = stack.enter_context(Side(rival.row, rival.variant))
        losses: dict[str, list[float]] = {name: [] for name in sides}
        # in weak scaling one rank trains another model, or another batch
        same = [name for name, side in sides.items() if side.row.case == row.case]

        def turns(number: int, count: int) -> dict[str, TimedSteps]:
            found = round_of({n: partial(s.train, count) for n, s in sides.items()}, number)
            for name, timed in found.items():
                losses[name] += timed.losses
            for name in same:
                check_losses(row, name, losses[OURS], losses[name])
            return found

        found = turns(0, WARM_STEPS)
        gemm_time_s, attention_time_s = sides[OURS].limits()
        done: dict[str, list[Round]] = {rival.tool: [] for rival in against}
        rounds = 0
        while not rounds or (
            time.monotonic() < until_s and not measuring.enough(done[against[0].tool], wanted)
        ):
            found = turns(rounds, steps)
            rounds += 1
            for tool, of_rival in pairs(found, against, row, steps).items():
                done[tool].append(of_rival)
            report(done)
    results = []
    for rival in against:
        theirs = found.get(rival.tool)
        sample = Constants(
            peak_memory_bytes=found[OURS].peak_memory_bytes,
            peer_peak_memory_bytes=theirs.peak_memory_bytes if theirs else None,
            gemm_time_s=gemm_time_s,
            attention_time_s=attention_time_s,
            losses=losses[OURS],
            peer_losses=losses.get(rival.tool, []),
            peer_trials=rival.tried,
        )
        names = (row.layout, row.precision, rival.tool, rival.name)
        results.append(
            measuring.summarise(names, done[rival.tool], wanted, sample, row.case.tokens)
        )
    return results


def pairs(
    found: Mapping[str, TimedSteps], against: Sequence[Rival], row: Row, steps: int
) -> dict[str, Round]:
    """A round as one pair of rates for each rival; a rival that never finished has its bound."""
    foreign = max(timed.foreign_share for timed in found.values())
    ours = steps * row.case.tokens / found[OURS].time_s
    rounds = {}
    for rival in against:
        rate = rival.at_most
        if rate is None:
            rate = steps * rival.row.case.tokens / found[rival.tool].time_s
        rounds[rival.tool] = Round(ours, rate, foreign)
    return rounds


def report(done: Mapping[str, Sequence[Round]]) -> None:
    last = {tool: rounds[-1] for tool, rounds in done.items()}
    one = next(iter(last.values()))
    others = ", ".join(
        f"{tool} {each.peer_tokens_per_s:.1f} (ratio {each.ratio:.3f})"
        for tool, each in last.items()
    )
    say(
        f"  round {len(next(iter(done.values())))}: {one.tokens_per_s:.1f} tokens/s, {others}; "
        f"other processes {one.foreign_share:.2f} cores" + (", disturbed" if one.disturbed else "")
    )


def profile(row: Row, folder: Path) -> None:
    """One profiled step of every rank, of this project and of plain torch, as tables."""
    folder.mkdir(parents=True, exist_ok=True)
    best, _ = Trials().fastest(row, "torch", own_rate(row))
    sides = {"ptdmpi": None} if best is None else {"ptdmpi": None, "torch": best}
    for name, variant in sides.items():
        with Side(row, variant) as side:
            side.train(WARM_STEPS)
            tables = [reply["table"] for reply in side.ask(profile=WARM_STEPS)]
        file = folder / f"profile-{row.id}-{name}.txt"
        file.write_text("\n".join(f"rank {rank}\n{text}" for rank, text in enumerate(tables)))
        say(f"wrote {file}")


def say(text: str) -> None:
    print(text, flush=True)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.bench", description=__doc__)
    parser.add_argument("--rows", help="ids, layouts or precisions, such as 't2 p2-bf16'")
    parser.add_argument("--peers", help=f"who is measured beside: some of {' '.join(TOOLS)} (all)")
    parser.add_argument("--rounds", type=positive, default=5, help="undisturbed rounds per row")
    parser.add_argument("--steps", type=positive, default=1, help="steps of a side in a round")
    parser.add_argument(
        "--minutes", type=positive, default=45, help="rows share them: fewer rounds where they end"
    )
    parser.add_argument("--profile", metavar="ROW", help="profile one step of a row instead")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    # the sides end with it
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        if options.profile:
            for row in select(options.profile):
                profile(row, RESULTS)
            return
        rows, tools = select(options.rows), select_tools(options.peers)
    except InputError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        sys.exit(2)
    order = [(row.layout, row.precision, tool) for row in select(None) for tool in row.peers]
    results: list[Result] = []
    failures: list[str] = []
    missing: list[str] = []
    if options.rows is None and measuring.machine()["bf16"] == "none":
        # a peer's products would be scalar code: the time is better spent on rounds of the others
        rows = [row for row in rows if row.precision != "bf16"]
        missing.append("bf16: left out on a processor without bf16; `--rows bf16` measures it")
    trials, end_s = Trials(), time.monotonic() + 60 * options.minutes
    for number, row in enumerate(rows):
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            missing.append(f"{row.id}: not reached in {options.minutes} minutes")
            continue
        until_s = time.monotonic() + left_s / (len(rows) - number)
        say(row.id)
        try:
            against, absent = rivals(row, tools, trials)
            missing += [f"{row.id}, {text}" for text in absent]
            if against:
                results += measure(row, options.rounds, options.steps, against, until_s)
        except SideFailed as failure:
            failures.append(str(failure))
            say(f"  {failure}")
            continue
        measuring.write(RESULTS / "latest.json", results, order)
        picture.draw(RESULTS / "latest.json", picture.PICTURE)
    say("\n".join([measuring.table(results), *missing, *scaling.lines(results)]))
    if failures:
        sys.exit(f"bench: {len(failures)} of {len(rows)} rows failed")


if __name__ == "__main__":
    main()
