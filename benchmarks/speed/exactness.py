"""The time and memory that reproducible sums cost, and the losses in each precision.

python -m benchmarks.speed.exactness reproducible [--rounds 5]   # sums on two data ranks
python -m benchmarks.speed.exactness leaves [--rounds 5]         # a tree of sums with more leaves
python -m benchmarks.speed.exactness precisions [--steps 300]    # losses in fp32, bf16 and fp16
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.launch import ROOT, answer
from benchmarks.speed import rounds as measuring
from benchmarks.speed.bench import positive, say
from benchmarks.speed.case import GptSizes, Row
from benchmarks.speed.sides import Side
from benchmarks.speed.trials import WARM_STEPS

LAST = 50  # number of steps whose mean loss is compared
PRECISIONS = ("fp32", "bf16", "fp16")


def reproducible(wanted: int) -> None:
    """Measure the time and memory of steps with and without `run.reproducible = true`, and print
    the ratios."""
    plain = Row("d=2", "fp32")
    compared(plain, replace(plain, reproducible=True), wanted, "with run.reproducible over without")


def leaves(wanted: int) -> None:
    """Compare training steps with many and with few gradients to add up. With `run.reproducible`,
    the gradients of the microbatches are the leaves of a tree of sums. The first kind of steps has
    8 leaves for 1024 tokens, and the second kind has one.

    A microbatch has 2 samples in the first kind of steps, and 16 samples in the second kind. All
    samples have 64 tokens, so both kinds compute the same attention. The 8 leaves represent 8
    chunks of a longer sample. (In a real longer sample, each chunk would also have a separate term
    in the gradients of keys and values. This benchmark does not measure these terms.)
    """
    many = Row("single", "fp32", GptSizes(seq_length=64, global_size=128), reproducible=True)
    few = replace(many, case=replace(many.case, micro_size=16))
    compared(few, many, wanted, "with 8 leaves for 1024 tokens over one")


def compared(base: Row, other: Row, wanted: int, words: str) -> None:
    """Measure step time and memory of two rows alternately, until `wanted` rounds were undisturbed,
    and print the ratios of `other` to `base`. `words` describes the ratio in the printed line."""
    with Side(base, None) as off, Side(other, None) as on:
        for side in (off, on):
            side.train(WARM_STEPS)
        done: list[measuring.Round] = []
        while not measuring.enough(done, wanted):
            order = (off, on) if len(done) % 2 == 0 else (on, off)
            timed = {side: side.train(1) for side in order}
            foreign = max(steps.foreign_share for steps in timed.values())
            with_it = base.case.tokens / timed[on].time_s
            without = base.case.tokens / timed[off].time_s
            done.append(measuring.Round(with_it, without, foreign))
    best = measuring.counted(done, wanted)
    times = [1.0 / r.ratio for r in best]
    memory_with = timed[on].peak_memory_bytes
    memory_without = timed[off].peak_memory_bytes
    say(
        f"{base.layout} {base.precision}, {len(best)} rounds, "
        f"{sum(r.disturbed for r in done)} of {len(done)} disturbed\n"
        f"step time {words}: {statistics.median(times):.3f} "
        f"({min(times):.3f} to {max(times):.3f})\n"
        f"greatest resident memory of a rank: {memory_without / 2**20:.0f} MiB without, "
        f"{memory_with / 2**20:.0f} MiB with ({memory_with / memory_without:.2f})"
    )


def precisions(steps: int) -> None:
    """Train the demo in each precision, and print the mean loss of the last steps."""
    if not (ROOT / "runs/demo-data/train").is_dir():
        sys.exit("exactness: runs/demo-data is missing: run `make demo` first")
    means: dict[str, float] = {}
    for precision in PRECISIONS:
        with tempfile.TemporaryDirectory(prefix="ptdmpi-precision-") as folder:
            settings = {
                "run.dir": folder,
                "run.steps": steps,
                "precision.compute": precision,
                "log.validate_every_steps": 0,
                "log.bigram_baseline": "false",
            }
            words = ["-m", "ptdmpi", "train", "jobs/demo.toml"]
            for key, value in settings.items():
                words += ["--set", f"{key}={value}"]
            print(answer(4, words), end="")
            lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
        means[precision] = statistics.fmean(losses[-LAST:])
    say(f"\nmean loss of the last {LAST} of {steps} steps, and its difference from fp32")
    for precision, mean in means.items():
        say(f"{precision}  {mean:.4f}  {mean - means['fp32']:+.4f}")


def main() -> None:
    """Run the measurement that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed.exactness", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("reproducible", "leaves"):
        commands.add_parser(name).add_argument("--rounds", type=positive, default=5)
    commands.add_parser("precisions").add_argument("--steps", type=positive, default=300)
    options = parser.parse_args()
    if options.command == "reproducible":
        reproducible(options.rounds)
    elif options.command == "leaves":
        leaves(options.rounds)
    else:
        precisions(options.steps)


if __name__ == "__main__":
    main()
