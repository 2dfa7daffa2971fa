"""The cost of reproducible sums, and the losses in each precision.

python -m benchmarks.speed.exactness reproducible [--rounds 5]   # d = 2, with and without
python -m benchmarks.speed.exactness precisions [--steps 300]    # fp32, bf16, fp16; the demo's data
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
from benchmarks.speed.case import Row
from benchmarks.speed.sides import Side
from benchmarks.speed.trials import WARM_STEPS

LAST = 50  # number of steps whose mean loss is compared
PRECISIONS = ("fp32", "bf16", "fp16")


def reproducible(wanted: int) -> None:
    """Measure step time and memory with `run.reproducible = true` and without, alternately, until
    `wanted` rounds were undisturbed."""
    plain = Row("d=2", "fp32")
    with Side(plain, None) as off, Side(replace(plain, reproducible=True), None) as on:
        for side in (off, on):
            side.train(WARM_STEPS)
        done: list[measuring.Round] = []
        while not measuring.enough(done, wanted):
            order = (off, on) if len(done) % 2 == 0 else (on, off)
            timed = {side: side.train(1) for side in order}
            foreign = max(steps.foreign_share for steps in timed.values())
            with_it = plain.case.tokens / timed[on].time_s
            without = plain.case.tokens / timed[off].time_s
            done.append(measuring.Round(with_it, without, foreign))
    best = measuring.counted(done, wanted)
    times = [1.0 / r.ratio for r in best]
    memory_with = timed[on].peak_memory_bytes
    memory_without = timed[off].peak_memory_bytes
    say(
        f"d=2 fp32, {len(best)} rounds, {sum(r.disturbed for r in done)} of {len(done)} disturbed\n"
        f"step time with run.reproducible over without: {statistics.median(times):.3f} "
        f"({min(times):.3f} to {max(times):.3f})\n"
        f"greatest resident memory of a rank: {memory_without / 2**20:.0f} MiB without, "
        f"{memory_with / 2**20:.0f} MiB with ({memory_with / memory_without:.2f})"
    )


def precisions(steps: int) -> None:
    """Print the mean loss of the last steps when the demo is trained in each precision."""
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
    commands.add_parser("reproducible").add_argument("--rounds", type=positive, default=5)
    commands.add_parser("precisions").add_argument("--steps", type=positive, default=300)
    options = parser.parse_args()
    if options.command == "reproducible":
        reproducible(options.rounds)
    else:
        precisions(options.steps)


if __name__ == "__main__":
    main()
