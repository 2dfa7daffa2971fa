"""Compare the kernels that ptdmpi measures at the start of a run (`run.kernels = "auto"`) with
PyTorch's kernels ("default") and with the kernels that presets/kernels.toml names ("kept").

python -m benchmarks.speed.own.choices [--rows "t2 single-bf16"] [--rounds 5]
taskset --cpu-list 0 python -m benchmarks.speed.own.choices    # on one core

Three trainers train the same row and take turns. Each round has one step of each trainer. The
choice of kernels is measured again, and not read from the user's cache.
"""

import argparse
import os
import statistics
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.speed import rounds as measuring
from benchmarks.speed.bench import positive, say
from benchmarks.speed.case import WEAK, Row, select
from benchmarks.speed.rounds import Round
from benchmarks.speed.sides import Side, TimedSteps
from benchmarks.speed.trials import WARM_STEPS
from benchmarks.turns import round_of

MEASURED = "auto"
OTHERS = ("default", "kept")
LEAST = 0.98  # the measured kernels must reach this fraction of the rate of PyTorch's kernels
# keys of an entry that do not say which kernel was chosen
LABELS = ("capability", "cpu", "type", "measured")


def rounds_of(row: Row, wanted: int) -> dict[str, list[Round]]:
    """Train a row with the measured kernels and with the other kernels alternately, until `wanted`
    rounds were undisturbed. Return the rounds for each of the other kernels (OTHERS)."""
    done: dict[str, list[Round]] = {name: [] for name in OTHERS}
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(Side(replace(row, kernels=name), None))
            for name in (MEASURED, *OTHERS)
        }
        for side in sides.values():
            side.train(WARM_STEPS)
        while not measuring.enough(done[OTHERS[0]], wanted):
            turns = {name: partial(side.train, 1) for name, side in sides.items()}
            timed = round_of(turns, len(done[OTHERS[0]]))
            foreign = max(steps.foreign_share for steps in timed.values())
            for name in OTHERS:
                done[name].append(
                    Round(_rate(row, timed[MEASURED]), _rate(row, timed[name]), foreign)
                )
    return done


def _rate(row: Row, steps: TimedSteps) -> float:
    return row.case.tokens / steps.time_s


def lines(row: Row, done: dict[str, list[Round]], wanted: int) -> Iterator[str]:
    """Yield a line for each of the other kernels, with the ratio of the rate with the measured
    kernels to the rate with the other kernels."""
    for name in OTHERS:
        used = measuring.counted(done[name], wanted)
        ratios = [each.ratio for each in used]
        quiet = sum(not each.disturbed for each in used)
        median = statistics.median(ratios)
        short = f", below {LEAST}" if name == "default" and median < LEAST else ""
        yield (
            f"{row.id}: {MEASURED} / {name} {median:.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
            f"{len(used)} rounds, {quiet} undisturbed{short}"
        )


def chosen(cache: Path) -> Iterator[str]:
    """Yield a line for each measurement in the cache folder `cache`, with the chosen kernels."""
    for path in sorted(cache.glob("ptdmpi/kernels/*.toml")):
        entries = tomllib.loads(path.read_text())["kernels"]
        words = []
        for kind, (entry, *_) in entries.items():
            keys = {key: value for key, value in entry.items() if key not in LABELS}
            words.append(f"{kind} {keys or 'by PyTorch'}")
        yield f"  measured: {', '.join(words)}"


def rows_of(text: str | None) -> Sequence[Row]:
    """Return the rows that `text` names; if it is None, the rows of strong scaling, in bf16 only if
    the processor has instructions for bf16."""
    rows = [row for row in select(text) if text is not None or row.layout not in WEAK]
    if text is None and measuring.machine()["bf16"] == "none":
        rows = [row for row in rows if row.precision != "bf16"]
    return rows


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser for the command `name` of this folder, with the option --rows."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.speed.own.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", help="ids, layouts or precisions [default: five layouts]")
    return parser


def main() -> None:
    """Compare the kernels in the rows that the command line names."""
    parser = parser_of("choices", __doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="undisturbed rounds of a row")
    options = parser.parse_args()
    for row in rows_of(options.rows):
        with tempfile.TemporaryDirectory(prefix="ptdmpi-kernels-") as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            done = rounds_of(row, options.rounds)
            if not (measured := list(chosen(Path(folder)))):
                measured = ["  not measured completely in time: missing kinds are the table's"]
        say("\n".join([*lines(row, done, options.rounds), *measured]))


if __name__ == "__main__":
    main()
