"""An answer of `ptdmpi ask`: a sentence, a table, numbers for a program, and a picture."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ptdmpi.plan.show.draw import check_picture, save
from ptdmpi.plan.show.table import lines

COLORS = ("#1f4e8c", "#c8511b", "#3b7d3b", "#8d5fb5")
MOST_INSIDE = 2  # If a panel has more lines than this, the legend is outside the panel.
LETTERS_PER_PANEL = 56  # A line of the title has at most this many letters per panel.
MOST_SHORT = 1e8  # A linear axis that ends below this has labels with all digits.
# If the end of a logarithmic axis exceeds this many times its start, the labels are powers of ten.
MOST_PLAIN = 300


@dataclass(frozen=True)
class Panel:
    """One diagram of a picture: lines through points (`lines`: name -> points), or one horizontal
    bar for each name (`bars`: name -> length).

    `across` and `up` are the labels of the horizontal and the vertical axis. `level` is the height
    and the label of a dashed horizontal line. `mark` is the position and the label of a dashed
    vertical line.
    """

    across: str
    up: str
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    bars: dict[str, float] = field(default_factory=dict)
    level: tuple[float, str] | None = None
    mark: tuple[float, str] | None = None
    logarithmic: str = ""  # the axes that are logarithmic: "x", "y", "xy", or "" for none


@dataclass(frozen=True)
class Reply:
    """An answer to a question of `ptdmpi ask`.

    `short` is the answer in a sentence or two. `rows` is a table; the first row has the headings of
    the columns. `notes` are the assumptions. `numbers` has the same results as a dict, for
    programs. `panels` are the diagrams of the picture, from left to right.
    """

    short: str
    rows: Sequence[Sequence[str]]
    numbers: dict[str, Any]
    title: str
    panels: Sequence[Panel]
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Return the answer as the text that `ptdmpi ask` prints: the short answer, the table and
        the notes."""
        table = ["", *lines(self.rows)] if self.rows else []
        return "\n".join([self.short, *table, *(["", *self.notes] if self.notes else [])])

    def draw(self, path: str | Path) -> None:
        """Write the picture to the file `path` (.png or .svg). Raises InputError if the picture
        cannot be written."""
        check_picture(path)
        from matplotlib.figure import Figure

        most = max(len(panel.lines) for panel in self.panels)
        height = 3.4 + 0.22 * most * (most > MOST_INSIDE)
        figure = Figure(figsize=(4.8 * len(self.panels), height), dpi=110, layout="constrained")
        title = textwrap.fill(self.title, LETTERS_PER_PANEL * len(self.panels))
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        grid = figure.subplots(1, len(self.panels), squeeze=False)
        for panel, axes in zip(self.panels, grid[0], strict=True):
            _draw(panel, axes)
        save(figure, path)


def _draw(panel: Panel, axes: Any) -> None:
    for color, (name, points) in zip(COLORS, panel.lines.items(), strict=False):
        across, up = zip(*points, strict=True)
        axes.plot(across, up, "o-" if len(points) < 30 else "-", color=color, label=name)
    if panel.bars:
        names = list(panel.bars)
        axes.barh(names[::-1], [panel.bars[name] for name in names[::-1]], color=COLORS[0])
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if name in panel.logarithmic:
            axes.set(**{f"{name}scale": "log"})
            _label_plainly(axis)
    heights = [up for points in panel.lines.values() for _, up in points]
    if "y" not in panel.logarithmic and heights and 2 * min(heights) < max(heights):
        axes.set_ylim(bottom=0)
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if name not in panel.logarithmic:
            _separate_thousands(axis)
    style: dict[str, Any] = {"color": "#777777", "linestyle": "--", "linewidth": 1}
    if panel.level is not None:
        axes.axhline(panel.level[0], label=panel.level[1], **style)
    if panel.mark is not None:
        axes.axvline(panel.mark[0], label=panel.mark[1], **style)
    axes.set_xlabel(panel.across)
    axes.set_ylabel(panel.up)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x" if panel.bars else "y", color="#eeeeee")
    if panel.lines and (len(panel.lines) > 1 or panel.level or panel.mark):
        axes.legend(frameon=False, fontsize=8, **_legend_place(panel))


def _label_plainly(axis: Any) -> None:
    """Label a logarithmic axis at 1, 2 and 5 times powers of ten, as plain numbers.

    By default, if the axis covers less than a decade, matplotlib also labels the minor ticks in
    scientific notation, and these labels overlap. An axis that covers many decades keeps
    matplotlib's labels.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    if high > MOST_PLAIN * low:
        return
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(_with_separators))
    axis.set_minor_formatter(NullFormatter())


def _separate_thousands(axis: Any) -> None:
    """Label a linear axis from 1,000 on with all digits, separated by thousands.

    By default, matplotlib prints 12000, and from 10^6 on it writes a power of ten at the end of the
    axis. An axis that ends at `MOST_SHORT` or later keeps matplotlib's labels, because labels with
    all digits would be too long.
    """
    from matplotlib.ticker import FuncFormatter

    if 1000 <= axis.get_view_interval()[1] < MOST_SHORT:
        axis.set_major_formatter(FuncFormatter(_with_separators))


def _with_separators(value: float, _: int | None) -> str:
    return f"{value:,.10g}"


def _legend_place(panel: Panel) -> dict[str, Any]:
    """Return the position of the legend. If a panel has many lines, the legend is below the panel,
    because inside the panel it would cover the lines."""
    if len(panel.lines) <= MOST_INSIDE:
        return {"loc": "best"}
    return {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}
