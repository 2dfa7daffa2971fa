"""`make figures`: draw Figures 11 to 18 of Narayanan et al. 2021, with published points and
predictions."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launch import ROOT
from benchmarks.planning.rows import PublishedRun, published
from benchmarks.planning.validate_plan import predicted

OUTPUT = ROOT / "docs/pictures"
COLORS = ("#1f4e8c", "#c8511b", "#3b7d3b")


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: its title, its horizontal axis, and two functions of a run, which
    return the run's position on this axis and the series to which the run belongs."""

    number: int
    title: str
    axis: str
    place: Callable[[PublishedRun], str]
    series: Callable[[PublishedRun], str]


def _batch(row: PublishedRun) -> str:
    return f"batch size {row.batch}"


def _scattered(row: PublishedRun) -> str:
    return "with scatter/gather" if row.layout.scatter_gather else "without scatter/gather"


def _recomputed(row: PublishedRun) -> str:
    return "with recomputation" if row.layout.recompute == "full" else "without recomputation"


FIGURES = (
    Figure(
        number=11,
        title="weak scaling of the pipeline",
        axis="pipeline-parallel size",
        place=lambda row: str(row.layout.pipeline),
        series=_batch,
    ),
    Figure(
        number=12,
        title="175B on 96 GPUs",
        axis="batch size",
        place=lambda row: str(row.batch),
        series=lambda row: "interleaved" if row.layout.virtual > 1 else "non-interleaved",
    ),
    Figure(
        number=13,
        title="162.2B on 64 GPUs",
        axis="(pipeline, tensor) parallel size",
        place=lambda row: f"({row.layout.pipeline}, {row.layout.tensor})",
        series=_batch,
    ),
    Figure(
        number=14,
        title="5.9B on 64 GPUs",
        axis="(pipeline, data) parallel size",
        place=lambda row: f"({row.layout.pipeline}, {row.layout.data})",
        series=_batch,
    ),
    Figure(
        number=15,
        title="5.9B on 64 GPUs",
        axis="(tensor, data) parallel size",
        place=lambda row: f"({row.layout.tensor}, {row.layout.data})",
        series=_batch,
    ),
    Figure(
        number=16,
        title="91B on 64 GPUs",
        axis="microbatch size",
        place=lambda row: str(row.layout.micro_size),
        series=_batch,
    ),
    Figure(
        number=17,
        title="145B on 128 GPUs",
        axis="batch size",
        place=lambda row: str(row.batch),
        series=_recomputed,
    ),
    Figure(
        number=18,
        title="175B on 96 GPUs",
        axis="batch size",
        place=lambda row: str(row.batch),
        series=_scattered,
    ),
)


def value(row: PublishedRun, figure: Figure) -> float:
    """Return the predicted value of a run, in the unit of the figure's vertical axis."""
    price = predicted(row)
    if figure.number == 17:
        return row.batch / price.step_time_s
    return price.hardware_tflops_per_rank


def draw(figure: Figure, path: Path) -> None:
    """Plot published points as circles and predictions as crosses on a line, with a color for each
    series."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(5.2, 3.4), dpi=110, layout="constrained")
    axes = canvas.subplots()
    rows = [row for row in published() if row.dataset == f"Figure {figure.number}"]
    places = list(dict.fromkeys(figure.place(row) for row in rows))
    for name, color in zip(dict.fromkeys(map(figure.series, rows)), COLORS, strict=False):
        own = [row for row in rows if figure.series(row) == name]
        at = [places.index(figure.place(row)) for row in own]
        guesses = [value(row, figure) for row in own]
        axes.plot(at, [row.value for row in own], "o", color=color, label=f"{name}, published")
        axes.plot(at, guesses, "x-", color=color, linewidth=0.8, label=f"{name}, predicted")
    axes.set_xticks(range(len(places)), places)
    axes.set_xlabel(figure.axis)
    axes.set_ylabel("sequences/s" if figure.number == 17 else "TFLOP/s per GPU")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Figure {figure.number}: {figure.title}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.legend(frameon=False, fontsize=7)
    canvas.savefig(path)


def main() -> None:
    """Draw all figures."""
    for figure in FIGURES:
        path = OUTPUT / f"figure-{figure.number}.png"
        draw(figure, path)
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
