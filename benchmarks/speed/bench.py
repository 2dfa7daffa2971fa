"""Measure this project and plain torch in turn, and write results/latest.json.

python -m benchmarks.speed.bench [--rows "t2 single-bf16"] [--rounds 5] [--steps 1] [--profile ROW]
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.speed import rounds as measuring
from benchmarks.speed.case import Row, Variant, choices, select
from benchmarks.speed.rounds import Constants, PeerTrial, Result, Round
from benchmarks.speed.sides import ANSWER_LIMIT_S, Side, SideFailed, SideTooSlow
from benchmarks.turns import round_of
from ptdmpi.config import InputError

RESULTS = Path(__file__).resolve().parent / "results"
WARM_STEPS = 1
TRIAL_MICROBATCHES = 2  # per data rank
GIVE_UP = 3.0  # a way is given up at so many times the fastest one's time,
FIRST_STEP_S = 5.0  # and what a first step may take longer
# Greatest relative difference between the two sides' losses in each step. The same computation in
# bf16 rounds at other places in the two sides.
LOSS_LIMITS = {"fp32": 1e-4, "bf16": 2e-3}


def check_losses(row: Row, ours: Sequence[float], peer: Sequence[float]) -> None:
    """Raises SideFailed unless both sides compute the same thing."""
    limit = LOSS_LIMITS[row.precision]
    for step, (a, b) in enumerate(zip(ours, peer, strict=True)):
        if not abs(a - b) <= limit * abs(b):  # not a number is no agreement either
            raise SideFailed(
                f"row {row.id}: at step {step} the loss is {a:.7g} here and {b:.7g} in torch: they "
                f"differ by more than {limit:g} relative, so it is not the same computation"
            )


class Trials:
    """Finds torch's fastest way for each row. A cast that was hopeless once is not tried again."""

    def __init__(self) -> None:
        self.hopeless: set[str] = set()

    def fastest(
        self, row: Row, tokens_per_s: float = 0.0
    ) -> tuple[Variant | None, dict[str, PeerTrial]]:
        """The fastest way, decision by decision, and all trials by the names of their ways.

        With our own `tokens_per_s`, ways much slower than it are given up too: None, where no way
        is left (bf16 on a CPU without bf16 instructions).
        """
        decisions = choices(row)
        best = Variant()
        for alternatives in decisions:
            best = replace(best, **alternatives[0])
        tried: dict[Variant, PeerTrial] = {}
        for alternatives in decisions:
            for change in alternatives:
                way = replace(best, **change)
                # where all casts are hopeless, one is tried all the same: it gives the bound
                hopeless = way.cast in self.hopeless and change is not alternatives[-1]
                if way not in tried and not hopeless:
                    rates = [trial.tokens_per_s for trial in tried.values() if trial.finished]
                    best_rate = max(rates, default=tokens_per_s)
                    tried[way] = attempt(short(row), way, best_rate)
                    if "cast" in change and not tried[way].finished:
                        self.hopeless.add(way.cast)
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
    say(f"  trial of torch, {way.name}: {at_most}{trial.tokens_per_s:.1f} tokens/s")
    return trial


def short(row: Row) -> Row:
    """The row with a smaller batch, for trials."""
    global_size = TRIAL_MICROBATCHES * row.case.micro_size * row.sizes.data
    return replace(row, case=replace(row.case, global_size=global_size))


def measure(row: Row, wanted: int, steps: int, trials: Trials) -> Result:
    """Alternate the two sides, repeating what was disturbed."""
    variant, tried = trials.fastest(row, own_rate(row) if row.precision == "bf16" else 0.0)
    if variant is None:
        return measure_alone(row, wanted, steps, tried)
    with Side(row, None) as ours, Side(row, variant) as peer:
        mine, theirs = ours.train(WARM_STEPS), peer.train(WARM_STEPS)
        losses, peer_losses = mine.losses, theirs.losses
        check_losses(row, losses, peer_losses)
        gemm_time_s = ours.gemm_time_s()
        tokens = steps * row.case.tokens
        done: list[Round] = []
        while not measuring.enough(done, wanted):
            sides = {"ours": lambda: ours.train(steps), "peer": lambda: peer.train(steps)}
            found = round_of(sides, len(done))
            mine, theirs = found["ours"], found["peer"]
            losses, peer_losses = losses + mine.losses, peer_losses + theirs.losses
            check_losses(row, losses, peer_losses)
            foreign = max(mine.foreign_share, theirs.foreign_share)
            done.append(Round(tokens / mine.time_s, tokens / theirs.time_s, foreign))
            report(done)
    sample = Constants(
        peak_memory_bytes=mine.peak_memory_bytes,
        peer_peak_memory_bytes=theirs.peak_memory_bytes,
        gemm_time_s=gemm_time_s,
        losses=losses,
        peer_losses=peer_losses,
        peer_trials=tried,
    )
    names = (row.layout, row.precision, f"{row.peer}, {variant.name}")
    return measuring.summarise(names, done, wanted, sample, row.case.tokens)


def own_rate(row: Row) -> float:
    """Our tokens per second on the small batch of the trials."""
    with Side(short(row), None) as ours:
        ours.train(WARM_STEPS)
        return short(row).case.tokens / ours.train(1).time_s


def measure_alone(row: Row, wanted: int, steps: int, tried: dict[str, PeerTrial]) -> Result:
    """Our side where every way of torch was given up: the ratios are what they are at least."""
    at_most = max(trial.tokens_per_s for trial in tried.values())
    tokens = steps * row.case.tokens
    with Side(row, None) as ours:
        losses = ours.train(WARM_STEPS).losses
        gemm_time_s = ours.gemm_time_s()
        done: list[Round] = []
        while not measuring.enough(done, wanted):
            mine = ours.train(steps)
            losses = losses + mine.losses
            done.append(Round(tokens / mine.time_s, at_most, mine.foreign_share))
            report(done)
    sample = Constants(
        peak_memory_bytes=mine.peak_memory_bytes,
        peer_peak_memory_bytes=None,
        gemm_time_s=gemm_time_s,
        losses=losses,
        peer_losses=[],
        peer_trials=tried,
    )
    names = (row.layout, row.precision, f"{row.peer}, bf16: no way finished")
    return measuring.summarise(names, done, wanted, sample, row.case.tokens)


def report(done: Sequence[Round]) -> None:
    last = done[-1]
    say(
        f"  round {len(done)}: {last.tokens_per_s:.1f} tokens/s, "
        f"torch {last.peer_tokens_per_s:.1f}, "
        f"ratio {last.ratio:.3f}; other processes {last.foreign_share:.2f} cores"
        + (", disturbed" if last.disturbed else "")
    )


def profile(row: Row, folder: Path) -> None:
    """One profiled step of every rank of both sides, as tables."""
    folder.mkdir(parents=True, exist_ok=True)
    best, _ = Trials().fastest(row, own_rate(row))
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
    parser.add_argument("--rounds", type=positive, default=5, help="undisturbed rounds per row")
    parser.add_argument("--steps", type=positive, default=1, help="steps of a side in a round")
    parser.add_argument("--profile", metavar="ROW", help="profile one step of a row instead")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    try:
        if options.profile:
            for row in select(options.profile):
                profile(row, RESULTS)
            return
        rows = select(options.rows)
    except InputError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        sys.exit(2)
    order = [(row.layout, row.precision) for row in select(None)]
    results: list[Result] = []
    failures: list[str] = []
    trials = Trials()
    for row in rows:
        say(row.id)
        try:
            results.append(measure(row, options.rounds, options.steps, trials))
        except SideFailed as failure:
            failures.append(str(failure))
            say(f"  {failure}")
            continue
        measuring.write(RESULTS / "latest.json", results, order)
    say(measuring.table(results))
    if failures:
        sys.exit(f"bench: {len(failures)} of {len(rows)} rows failed")


if __name__ == "__main__":
    main()
