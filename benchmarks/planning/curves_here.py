"""`make curves-here`: the curves of Narayanan et al. 2021 (Figures 12 to 18), repeated on this
machine.

The curves show predictions and measurements of a small GPT on two and four ranks. Each curve varies
one of these settings: the batch size (which changes the bubble), the division of the ranks between
two of the three axes, the microbatch size, recomputation, or scatter/gather. `ptdmpi probe`
measures the machine with the same number of ranks as the training. If the machine has fewer than
four cores, four ranks share these cores. While one rank waits in training, the other ranks run
faster than in the probe, in which all ranks work at the same time.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.launch import ROOT
from benchmarks.planning.figures import COLORS
from benchmarks.planning.steps_here import TimedCase, Turns, measured_steps
from benchmarks.planning.validate_here import probed
from ptdmpi.config.layout import Layout
from ptdmpi.plan.cost.price import Pricer
from ptdmpi.plan.machine.cluster import load_model
from ptdmpi.plan.show.table import lines

TURNS = Turns("l=8,h=256,a=4,s=128,V=1024", "fp32", rounds=3, steps=3)
PICTURE = ROOT / "docs/pictures/curves-here.png"
BATCHES = (4, 8, 16)
Point = tuple[str, TimedCase]  # a point of a curve: (label on the horizontal axis, case)


@dataclass(frozen=True)
class Curve:
    """A panel of the picture: the figure of the paper that the panel repeats, and the series that
    the panel shows, by name."""

    figure: str
    title: str
    axis: str
    ranks: int
    series: dict[str, tuple[Point, ...]]


def _over_batch(layout: Layout) -> tuple[Point, ...]:
    return tuple((str(batch), TimedCase(layout, batch)) for batch in BATCHES)


def _axes(first: str, second: str, ranks: int, batch: int) -> tuple[Point, ...]:
    """Return a point of a curve for each division of `ranks` ranks between the axes `first` and
    `second`, with `batch` sequences in a step."""
    points = []
    for size in (1, 2, 4):
        sizes = {"tensor": 1, "pipeline": 1, "data": 1} | {first: size, second: ranks // size}
        points.append((f"({size}, {ranks // size})", TimedCase(Layout(**sizes), batch)))
    return tuple(points)


def _bubble(pipeline: int) -> Curve:
    return Curve(
        figure="12",
        title=f"interleaved against 1F1B, p = {pipeline}",
        axis="batch size",
        ranks=pipeline,
        series={
            "interleaved, v = 2": _over_batch(
                Layout(1, pipeline, 1, virtual=2, schedule="interleaved")
            ),
            "1F1B": _over_batch(Layout(1, pipeline, 1)),
        },
    )


def _pair(figure: str, first: str, second: str) -> Curve:
    sizes = {f"batch size {batch}": _axes(first, second, 4, batch) for batch in (4, 16)}
    words = f"{first} against {second} axis"
    return Curve(
        figure=figure, title=words, axis=f"({first}, {second}) parallel size", ranks=4, series=sizes
    )


CURVES = (
    _bubble(2),
    _bubble(4),
    _pair("13", "pipeline", "tensor"),
    _pair("14", "pipeline", "data"),
    _pair("15", "tensor", "data"),
    Curve(
        figure="16",
        title="microbatch size, p = 2",
        axis="microbatch size",
        ranks=2,
        series={
            f"batch size {batch}": tuple(
                (str(size), TimedCase(Layout(1, 2, 1, micro_size=size), batch))
                for size in (1, 2, 4)
            )
            for batch in (4, 16)
        },
    ),
    Curve(
        figure="17",
        title="recomputation, p = 2",
        axis="batch size",
        ranks=2,
        series={
            "with recomputation": _over_batch(Layout(1, 2, 1, recompute="full")),
            "without recomputation": _over_batch(Layout(1, 2, 1)),
        },
    ),
    Curve(
        figure="18",
        title="scatter/gather, t = 2, p = 2",
        axis="batch size",
        ranks=4,
        series={
            "with scatter/gather": _over_batch(Layout(2, 2, 1)),
            "without scatter/gather": _over_batch(Layout(2, 2, 1, scatter_gather=False)),
        },
    ),
)


@dataclass(frozen=True)
class CaseTimes:
    """The step times of a case: the measured time in each round, and the predicted time."""

    measured_s: Sequence[float]
    predicted_s: float

    @property
    def median_s(self) -> float:
        """Return the median of the measured step times in seconds."""
        return statistics.median(self.measured_s)

    @property
    def error(self) -> float:
        """Return the relative error of the predicted step time."""
        return self.predicted_s / self.median_s - 1


def measure(ranks: int) -> dict[TimedCase, CaseTimes]:
    """Return the measured and predicted step times of every case in the curves for `ranks` ranks. A
    case that is in several curves is measured only once."""
    series = [
        points for curve in CURVES if curve.ranks == ranks for points in curve.series.values()
    ]
    cases = list(dict.fromkeys(case for points in series for _, case in points))
    cluster = probed(ranks, TURNS.precision)
    model = load_model(TURNS.model)
    measured = measured_steps(ranks, cases, TURNS)
    return {
        case: CaseTimes(
            times,
            Pricer.of(cluster, model, case.batch, TURNS.precision).price(case.layout).step_time_s,
        )
        for case, times in zip(cases, measured, strict=True)
    }


def table(curve: Curve, by_case: dict[TimedCase, CaseTimes]) -> list[list[str]]:
    """Return a table with the measured and the predicted sequences per second of a curve."""
    rows = [[f"Figure {curve.figure}: {curve.title}", "measured", "spread", "predicted", "error"]]
    for name, points in curve.series.items():
        for place, case in points:
            times = by_case[case]
            spread = (max(times.measured_s) - min(times.measured_s)) / times.median_s
            rows.append(
                [
                    f"{name}, {place}",
                    f"{case.batch / times.median_s:.1f} sequences/s",
                    f"{spread:.0%}",
                    f"{case.batch / times.predicted_s:.1f}",
                    f"{1 / (1 + times.error) - 1:+.0%}",
                ]
            )
    return rows


def draw(by_ranks: dict[int, dict[TimedCase, CaseTimes]]) -> None:
    """Plot a panel for each curve. Measured points are circles, and predictions are crosses on a
    line."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(10.4, 11.2), dpi=100, layout="constrained")
    for axes, curve in zip(canvas.subplots(4, 2).flat, CURVES, strict=True):
        times = by_ranks[curve.ranks]
        for (name, points), color in zip(curve.series.items(), COLORS, strict=False):
            at = range(len(points))
            measured = [case.batch / times[case].median_s for _, case in points]
            guesses = [case.batch / times[case].predicted_s for _, case in points]
            axes.plot(at, measured, "o", color=color, label=f"{name}, measured")
            axes.plot(at, guesses, "x-", color=color, linewidth=0.8, label=f"{name}, predicted")
        places = [place for place, _ in next(iter(curve.series.values()))]
        axes.set_xticks(range(len(places)), places)
        axes.set_xlabel(curve.axis)
        axes.set_ylabel("sequences/s")
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        axes.set_title(
            f"as Figure {curve.figure}: {curve.title}, {curve.ranks} ranks",
            loc="left",
            fontsize=10,
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#eeeeee")
        axes.legend(frameon=False, fontsize=7)
    canvas.savefig(PICTURE)


def main() -> None:
    """Measure and predict the step times of all curves, print their tables and draw the picture."""
    by_ranks = {ranks: measure(ranks) for ranks in sorted({curve.ranks for curve in CURVES})}
    print(f"{TURNS.model}, {TURNS.precision}, one thread per rank")
    for curve in CURVES:
        print("\n".join(lines(table(curve, by_ranks[curve.ranks]))), end="\n\n")
    for ranks, by_case in by_ranks.items():
        errors = [abs(times.error) for times in by_case.values()]
        print(
            f"{ranks} ranks, {len(errors)} cases: median error of the step "
            f"{statistics.median(errors):.1%}, largest {max(errors):.1%}"
        )
    draw(by_ranks)
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
