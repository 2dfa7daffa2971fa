"""The parts of an answer: a sentence, a table, numbers for a program, a picture."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ptdmpi.plan.show.draw import check_picture, save
from ptdmpi.plan.show.table import lines

COLORS = ("#1f4e8c", "#c8511b", "#3b7d3b", "#8d5fb5")
LETTERS_PER_PANEL = 56  # letters of a title


@dataclass(frozen=True)
class Panel:
    """One picture, of points joined by lines (`lines`: name -> points) or of bars by name.

    `level` is a dashed horizontal line, `mark` a line at a point of the horizontal axis, each with
    a label.
    """

    across: str
    up: str
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    bars: dict[str, float] = field(default_factory=dict)
    level: tuple[float, str] | None = None
    mark: tuple[float, str] | None = None
    logarithmic: str = ""  # "x", "y" or "xy"


@dataclass(frozen=True)
class Reply:
    """An answer to a question of `ptdmpi ask`.

    `short`: the answer in a sentence or two; `rows`: a table, with its head first; `notes`: the
    assumptions; `numbers`: the same for a program; `panels`: the pictures.
    """

    short: str
    rows: Sequence[Sequence[str]]
    numbers: dict[str, Any]
    title: str
    panels: Sequence[Panel]
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Return the text to print."""
        table = ["", *lines(self.rows)] if self.rows else []
        return "\n".join([self.short, *table, *(["", *self.notes] if self.notes else [])])

    def draw(self, path: str | Path) -> None:
        """Write the picture (.png or .svg). Raises InputError if it cannot be written."""
        check_picture(path)
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.8 * len(self.panels), 3.4), dpi=110, layout="constrained")
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
    if "x" in panel.logarithmic:
        axes.set_xscale("log")
    heights = [up for points in panel.lines.values() for _, up in points]
    if "y" in panel.logarithmic:
        axes.set_yscale("log")
    elif heights and 2 * min(heights) < max(heights):
        axes.set_ylim(bottom=0)
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
        axes.legend(frameon=False, fontsize=8)
