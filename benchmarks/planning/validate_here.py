"""`make validate-plan-here`: compare predictions for this machine with measured steps.

`ptdmpi probe` measures the machine with two ranks. Then the steps of sixteen layouts on one and two
ranks are measured. The predicted order of two layouts is checked only if their measured times
differ by more than the spread of the rounds.
"""

import itertools
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.launch import answer
from benchmarks.planning.steps_here import TimedCase, Turns, measured_steps
from ptdmpi.config.layout import Layout
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import Cluster, load_cluster, load_model
from ptdmpi.plan.show.table import lines

RANKS = 2
BATCH = 8
PRECISION = "fp32"
MODEL = "l=6,h=384,a=6,s=256,V=2048"
LAYOUTS = (
    Layout(1, 1, 1, micro_size=2),
    Layout(1, 1, 2, micro_size=1),
    Layout(1, 1, 2, micro_size=4),
    Layout(1, 1, 2, micro_size=2, recompute="full"),
    Layout(1, 1, 2, micro_size=2, zero=1),
    Layout(1, 1, 2, micro_size=2, zero=2),
    Layout(1, 1, 2, micro_size=2, zero=3),
    Layout(1, 1, 2, micro_size=1, zero=3, recompute="full"),
    Layout(2, 1, 1, micro_size=1),
    Layout(2, 1, 1, micro_size=4),
    Layout(2, 1, 1, micro_size=4, sequence_parallel=True),
    Layout(1, 2, 1, micro_size=1),
    Layout(1, 2, 1, micro_size=4),
    Layout(1, 2, 1, micro_size=2, schedule="gpipe"),
    Layout(tensor=1, pipeline=2, data=1, virtual=2, micro_size=1, schedule="interleaved"),
    Layout(
        tensor=1,
        pipeline=2,
        data=1,
        virtual=3,
        micro_size=2,
        schedule="interleaved",
        recompute="full",
    ),
)


class Order(NamedTuple):
    """The agreement of the predicted order of layouts with their measured order: Kendall's tau over
    `pairs` pairs of layouts (NaN if there are no pairs). A further `ties` pairs are left out,
    because the medians of the two layouts differ by no more than the larger spread of their
    rounds."""

    tau: float
    pairs: int
    ties: int


def kendall(predicted: Sequence[float], measured: Sequence[Sequence[float]]) -> Order:
    """Return the agreement of the order of the predicted step times with the order of the measured
    step times. `predicted` has one time for each layout, and `measured` has, for each layout, its
    times in all rounds."""
    signs = []
    ties = 0
    for i, j in itertools.combinations(range(len(measured)), 2):
        gap = statistics.median(measured[i]) - statistics.median(measured[j])
        spread = max(max(times) - min(times) for times in (measured[i], measured[j]))
        if abs(gap) <= spread:
            ties += 1
            continue
        signs.append(1 if gap * (predicted[i] - predicted[j]) > 0 else -1)
    return Order(statistics.fmean(signs or [math.nan]), len(signs), ties)


def compare(predicted: Sequence[float], measured: Sequence[Sequence[float]]) -> str:
    """Return a text: a table of the layouts with their measured and predicted step times, and two
    lines with the errors of the predictions and with the agreement of the orders."""
    rows = [["layout", "measured", "spread", "predicted", "error", ""]]
    errors = []
    for layout, guess, times in zip(LAYOUTS, predicted, measured, strict=True):
        median = statistics.median(times)
        errors.append(guess / median - 1)
        notes = [layout.schedule, f"recompute {layout.recompute}"]
        if layout.sequence_parallel:
            notes.append("sequence parallel")
        if layout.sharding:
            notes.append(layout.sharding)
        rows.append(
            [
                str(layout),
                f"{median:.3f} s",
                f"{(max(times) - min(times)) / median:.1%}",
                f"{guess:.3f} s",
                f"{errors[-1]:+.1%}",
                ", ".join(notes),
            ]
        )
    order = kendall(predicted, measured)
    return "\n".join(
        [
            *lines(rows),
            "",
            f"median error {statistics.median(map(abs, errors)):.1%} (goal 8 %), "
            f"largest {max(map(abs, errors)):.1%} (goal 20 %)",
            f"Kendall tau {order.tau:.2f} over {order.pairs} pairs, {order.ties} near-ties left "
            "out (goal 0.9)",
        ]
    )


def probed(ranks: int, precision: str) -> Cluster:
    """Run `ptdmpi probe` on `ranks` ranks, print its report, and return the measured cluster."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "here.toml")
        print(answer(ranks, ["-m", "ptdmpi", "probe", "--output", path, "--precision", precision]))
        return load_cluster(path)


def main() -> None:
    """Measure the machine by `ptdmpi probe`, predict and measure the layouts, and print the
    table."""
    pricer = Pricer.of(probed(RANKS, PRECISION), load_model(MODEL), BATCH, PRECISION)
    cases = [TimedCase(layout, BATCH) for layout in LAYOUTS]
    measured = measured_steps(RANKS, cases, Turns(MODEL, PRECISION))
    predicted = [pricer.price(layout).step_time_s for layout in LAYOUTS]
    print(f"{MODEL}, batch {BATCH}, {PRECISION}, one thread per rank")
    print(compare(predicted, measured))


if __name__ == "__main__":
    main()
