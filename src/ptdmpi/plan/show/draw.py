"""Pictures of a timeline: as text for a terminal, as PNG or as SVG. Planned and measured timelines
are drawn in the same way.

Each kind of op (such as forward and backward) has a letter and a colour (see `OP_KINDS`), and each
model chunk of a rank has its own shade of the colour. Forwards are blue and backwards green, as in
Narayanan et al. 2021, Figure 4. Idle time is grey, and waiting for an input is hatched.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptdmpi.base.disk import replacing
from ptdmpi.config import InputError
from ptdmpi.plan.schedule.ops import OP_KINDS, Ink, Op, OpKind, kind_of_span
from ptdmpi.plan.schedule.simulate import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_SHADES = 4  # Number of shades of each colour; chunks of a rank differ in shade.
_DARK_SHADES = 2  # Letters are white on this many of the darkest shades, black on the others.
# Colours of letters: (number of the colour in a terminal, name in a picture).
_WHITE, _BLACK = (15, "white"), (16, "#1c2733")
# Style of a number in a bar. The key is True if the number is written horizontally, and False if it
# is written vertically.
_TURNS: dict[bool, dict[str, Any]] = {
    True: {"va": "center_baseline", "rotation": "horizontal"},
    False: {"va": "center", "rotation": "vertical"},
}
# Leave out the date, so that two pictures of the same timeline are identical files.
_METADATA = {"svg": {"Date": None}}
# A legend has _LEGEND_COLUMNS columns, and two more if all its entries are shorter than
# _SHORT_ENTRY characters.
_LEGEND_COLUMNS, _SHORT_ENTRY = 5, 18
_COLORS = {
    "send": "#e0a458",
    "gather": "#c77dbb",
    "reduce": "#8d5fb5",
    "optimizer": "#d1603d",
    "data": "#f2d16b",
    "other": "#9a9aa5",
}
_LEGEND_ROW_INCHES = 0.2
_LEAST_LETTER = 4.0  # smallest size of letters, in points; smaller letters would be illegible
_IDLE, _HATCH = "#ececef", "#b4b4bd"
_LETTERS = {"send": "s", "gather": "g", "reduce": "r", "optimizer": "o", "data": "d", "other": "x"}
_WIDTH_INCHES, _LANE_INCHES, _MARGIN_INCHES, _LEGEND_INCHES = 11.0, 0.32, 0.75, 0.5
_SIDES_INCHES = (0.75, 0.15)  # margins to the left and to the right of the bars
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


class Chunks:
    """The model chunks of each rank, derived from the stages whose ops the rank runs. The first
    chunk of a rank has the index 0."""

    def __init__(self, timeline: Timeline) -> None:
        # stages are derived from the spans, because a timeline that was read from a file has no
        # schedule
        stages: dict[int, set[int]] = {}
        for span in timeline.spans:
            if span.computes:
                stages.setdefault(span.rank, set()).add(Op.parse(span.op).stage)
        self.stages = {rank: sorted(of_rank) for rank, of_rank in stages.items()}
        self.count = max(map(len, self.stages.values()), default=1)

    def shade(self, chunk: int) -> int:
        """Return the index of the shade of `chunk`. The first chunk has the darkest shade, the last
        chunk the lightest."""
        return chunk * (_SHADES - 1) // max(self.count - 1, 1)

    def shade_of(self, span: Span) -> int:
        """Return the index of the shade in which a span is drawn; 0 if the span is not an op."""
        if not span.computes:
            return 0
        return self.shade(self.stages[span.rank].index(Op.parse(span.op).stage))


def terminal(timeline: Timeline, width: int, *, color: bool) -> str:
    """Return the timeline as text of at most `width` columns: one line per rank, then a legend.

    Each op is shown as the number of its microbatch. The rest of the op's width is filled with the
    mark of its kind, or, in colour, with blanks. If some op is too narrow for its number, only the
    last digit of each number is shown, or no digit at all. In this case, an additional line says
    how many columns would show all numbers.
    """
    ranks, chunks = timeline.ranks, Chunks(timeline)
    names = {rank: f"rank {rank:>{len(str(ranks[-1]))}} " for rank in ranks}
    margin = max(map(len, names.values()), default=0)
    columns_per_s = _columns_per_s(timeline, max(width - margin, 1))
    label, note = _labels(timeline, columns_per_s, margin, color=color)
    lanes = {rank: ["."] * round(timeline.makespan_s * columns_per_s) for rank in ranks}
    for span in timeline.spans:
        if span.kind == "receive":
            continue
        first, end = _cells(span, timeline, columns_per_s)
        kind = kind_of_span(span.kind)
        if kind is None:
            cells = [_LETTERS[span.kind]] * (end - first)
        elif color:
            cells = _colored(label(span), end - first, kind.ink, chunks.shade_of(span))
        else:
            cells = list(label(span).ljust(end - first, kind.mark)[: end - first])
        lanes[span.rank][first:end] = cells
    kinds = {span.kind for span in timeline.spans}
    drawn = _drawn_kinds([timeline])
    signs = [f"{kind.mark} {kind.span}" for kind in drawn]
    if color:
        signs = [f"{kind.ink.name}: {kind.span}" for kind in drawn]
    legend = ["number: microbatch", *signs, ". idle"]
    legend += [f"{letter} {kind}" for kind, letter in _LETTERS.items() if kind in kinds]
    lines = [names[rank] + "".join(lanes[rank]) for rank in ranks]
    if timeline.title:
        lines.insert(0, timeline.title)
    return "\n".join([*lines, ", ".join(legend), *note])


def _colored(text: str, width: int, ink: Ink, shade: int) -> list[str]:
    """Return the content of `width` columns of a terminal, one string per column: `text` followed
    by blanks, on a background in the shade `shade` of the colour `ink`."""
    cells = list(text.ljust(width)[:width])
    if cells:
        letters, _ = _letters_on(shade)
        cells[0] = f"\x1b[38;5;{letters};48;5;{ink.ansi[shade]}m{cells[0]}"
        cells[-1] += "\x1b[0m"
    return cells


def _letters_on(shade: int) -> tuple[int, str]:
    """Return the colour of letters on a background of this shade, for a terminal and for a
    picture."""
    if shade < _DARK_SHADES:
        return _WHITE
    return _BLACK


def _drawn_kinds(timelines: Sequence[Timeline]) -> list[OpKind]:
    """Return the kinds of ops that occur in the timelines, in the order of `OP_KINDS`."""
    drawn = {span.kind for timeline in timelines for span in timeline.spans}
    return [kind for kind in OP_KINDS.values() if kind.span in drawn]


def _columns_per_s(timeline: Timeline, columns: int) -> float:
    """Return the largest scale, in columns per second, at which the timeline fits into `columns`
    columns of a terminal. If all ops start and end at multiples of the time of the shortest op, the
    scale is rounded down so that this time is a whole number of columns. Then no op is shortened or
    lengthened by rounding."""
    if timeline.makespan_s <= 0:
        return 0.0
    computes = [span for span in timeline.spans if span.computes]
    widest = columns / timeline.makespan_s
    tick_s = min((span.end_s - span.start_s for span in computes), default=0.0)
    if tick_s <= 0 or widest * tick_s < 1:
        return widest
    moments = {
        (moment - timeline.start_s) / tick_s
        for span in computes
        for moment in (span.start_s, span.end_s)
    }
    if all(math.isclose(moment, round(moment), abs_tol=1e-6) for moment in moments):
        return math.floor(widest * tick_s + 1e-9) / tick_s
    return widest


def _cells(span: Span, timeline: Timeline, columns_per_s: float) -> tuple[int, int]:
    """Return the first terminal column in which a span is drawn, and the first column after the
    span, at the scale `columns_per_s`."""
    first, end = (
        round((moment - timeline.start_s) * columns_per_s) for moment in (span.start_s, span.end_s)
    )
    return first, end


def _labels(
    timeline: Timeline, columns_per_s: float, margin: int, *, color: bool
) -> tuple[Callable[[Span], str], list[str]]:
    """Return two values for a timeline whose lines begin in column `margin`: a function that
    returns the label of a span at the scale `columns_per_s`, and a list. If the labels are
    shortened, the list has a note for the user that says so. Otherwise the list is empty."""
    computes = [span for span in timeline.spans if span.computes]
    microbatches = [Op.parse(span.op).microbatch for span in computes]
    longest = len(str(max(microbatches, default=0)))
    first_kind = next(iter(OP_KINDS.values())).span

    def needed(span: Span, digits: int) -> int:
        # A number of several digits needs one more column as a gap. A number of one digit needs one
        # more column for the mark that shows the kind of op. In colour, the colour shows the kind,
        # and ops of the first kind (forward) need no mark.
        return digits + (digits > 1 or (span.kind != first_kind and not color))

    def fits(digits: int) -> bool:
        widths = (_cells(span, timeline, columns_per_s) for span in computes)
        return all(
            end - first >= needed(span, digits)
            for span, (first, end) in zip(computes, widths, strict=True)
        )

    if fits(longest):
        return lambda span: str(Op.parse(span.op).microbatch), []
    full_columns_per_s = max(
        needed(span, longest) / max(span.end_s - span.start_s, 1e-12) for span in computes
    )
    full = margin + math.ceil(full_columns_per_s * timeline.makespan_s)
    if fits(1):
        note = f"(microbatch numbers modulo 10; about {full} columns show them in full)"
        return lambda span: str(Op.parse(span.op).microbatch % 10), [note]
    return lambda span: "", [f"(too narrow for microbatch numbers: about {full} columns show them)"]


def figure(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Draw the timelines into a PNG or SVG file, one below the other. Each timeline has a row of
    bars for each rank.

    If all timelines have the same unit, they have the same scale. Raises InputError if the suffix
    is neither .png nor .svg, or if the path cannot be written. If writing fails, an older file at
    this path remains unchanged.
    """
    check_picture(path)
    import matplotlib
    from matplotlib.figure import Figure

    lanes = [max(len(timeline.ranks), 1) for timeline in timelines]
    heights = [_LANE_INCHES * count + _MARGIN_INCHES for count in lanes]
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "ptdmpi", "hatch.linewidth": 0.6}):
        handles = _legend(timelines)
        columns = _LEGEND_COLUMNS
        if all(len(str(handle.get_label())) < _SHORT_ENTRY for handle in handles):
            columns += 2
        columns = min(columns, len(handles))
        rows = math.ceil(len(handles) / columns)
        below = _LEGEND_INCHES + _LEGEND_ROW_INCHES * (rows - 1)
        drawing = Figure(figsize=(_WIDTH_INCHES, sum(heights) + below), dpi=160)
        _draw_all(drawing, timelines, heights, below)
        drawing.legend(  # the rows of the legend have equal lengths
            handles=handles,
            loc="lower center",
            ncols=math.ceil(len(handles) / rows),
            frameon=False,
            handlelength=1.4,
            columnspacing=1.4,
        )
        save(drawing, path)


def check_picture(path: str | Path) -> None:
    """Raise InputError if the name of the file `path` ends neither in .png nor in .svg."""
    if Path(path).suffix.lower() not in (".png", ".svg"):
        raise InputError(f'{path}: pictures are .png or .svg, not "{Path(path).suffix}"')


def save(drawing: "Figure", path: str | Path) -> None:
    """Write the picture `drawing` to the file `path`. If writing fails, no incomplete file remains.
    Raises InputError for a suffix other than .png and .svg, and if the file cannot be written."""
    check_picture(path)
    kind = Path(path).suffix.lower()[1:]
    metadata = _METADATA.get(kind)
    fill(Path(path), lambda file: drawing.savefig(file, format=kind, metadata=metadata))


def _legend(timelines: Sequence[Timeline]) -> list["Patch"]:
    """Return the entries of the legend. Chunks with the same shade share one entry."""
    from matplotlib.patches import Patch

    handles: dict[str, Patch] = {}
    for kind in _drawn_kinds(timelines):
        for timeline in timelines:
            chunks = Chunks(timeline)
            alike: dict[int, list[int]] = {}
            for chunk in range(chunks.count):
                alike.setdefault(chunks.shade(chunk), []).append(chunk)
            for shade, own in alike.items():
                name = kind.span
                if len(own) > 1:
                    name = f"{kind.span}, chunks {own[0]} to {own[-1]}"
                elif chunks.count > 1:
                    name = f"{kind.span}, chunk {own[0]}"
                handles[name] = Patch(color=kind.ink.shades[shade], label=name)
    waiting = "waiting for input"
    handles["idle"] = Patch(color=_IDLE, label="idle, or not measured")
    handles[waiting] = Patch(facecolor=_IDLE, edgecolor=_HATCH, hatch="/////", label=waiting, lw=0)
    drawn = {span.kind for timeline in timelines for span in timeline.spans}
    for span_kind, tint in _COLORS.items():
        if span_kind in drawn:
            handles[span_kind] = Patch(color=tint, label=span_kind)
    return list(handles.values())


def _draw_all(
    drawing: "Figure", timelines: Sequence[Timeline], heights: Sequence[float], below: float
) -> None:
    """Draw one panel for each timeline, from top to bottom, above the legend. `heights` has the
    heights of the panels and `below` is the height of the legend, in inches."""
    total = sum(heights) + below
    left, right = _SIDES_INCHES
    top = total
    units = {timeline.time_unit for timeline in timelines}
    extents_s = [timeline.makespan_s for timeline in timelines]
    if len(units) == 1:
        extents_s = [max(extents_s)] * len(extents_s)
    for timeline, height, extent_s in zip(timelines, heights, extents_s, strict=True):
        bottom = top - height
        axes = drawing.add_axes(
            (
                left / _WIDTH_INCHES,
                (bottom + 0.45) / total,
                1 - (left + right) / _WIDTH_INCHES,
                (height - _MARGIN_INCHES) / total,
            )
        )
        _draw_lanes(axes, timeline, extent_s)
        top = bottom


def _draw_lanes(axes: "Axes", timeline: Timeline, extent_s: float) -> None:
    """Draw `timeline` into the panel `axes`: its bars, its microbatch numbers, and its time axis,
    which covers a time of `extent_s`."""
    ranks, chunks = timeline.ranks, Chunks(timeline)
    unit_s, unit = _readable_unit(timeline, extent_s)
    lane = {rank: place for place, rank in enumerate(ranks)}
    bars: dict[tuple[str, int], list[Span]] = {}
    for span in timeline.spans:
        bars.setdefault((span.kind, chunks.shade_of(span)), []).append(span)

    def x(moment_s: float) -> float:
        return (moment_s - timeline.start_s) / unit_s

    axes.barh(list(lane.values()), timeline.makespan_s / unit_s, left=0, height=0.86, color=_IDLE)
    for (kind, shade), spans in sorted(bars.items(), key=lambda item: item[1][0].computes):
        _draw_bars(
            axes,
            kind,
            shade,
            [(x(s.start_s), lane[s.rank] - 0.43, (s.end_s - s.start_s) / unit_s) for s in spans],
        )
    _draw_numbers(axes, timeline, chunks, x, extent_s=extent_s)

    axes.set_xlim(0, extent_s / unit_s or 1)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    step = math.ceil(len(ranks) / 64)
    axes.set_yticks(range(0, len(ranks), step), [f"rank {rank}" for rank in ranks[::step]])
    axes.set_xlabel(f"time ({unit})", labelpad=2)
    axes.tick_params(length=2, color=_HATCH)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(timeline.title, loc="left", fontsize=10, fontweight="bold")
    if any(span.computes for span in timeline.spans):
        bubble = f"bubble {timeline.bubble_fraction():.1%} of ideal time"
        axes.set_title(bubble, loc="right", fontsize=9, color="#55555f")


def _draw_bars(
    axes: "Axes", kind: str, shade: int, bars: Sequence[tuple[float, float, float]]
) -> None:
    """Draw all bars of one kind and shade as one collection; each bar is given as (left, bottom,
    width)."""
    from matplotlib.collections import PathCollection, PolyCollection
    from matplotlib.path import Path as Outline
    from numpy import array

    across, up = array([0, 1, 1, 0]), array([0, 0, 0.86, 0.86])
    corners = [array([x + width * across, y + up]).T for x, y, width in bars]
    if kind == "receive":
        # draw one path for all bars, because hatching ten thousand separate bars would take a
        # minute
        outline = Outline.make_compound_path_from_polys(array(corners))
        style = {"fc": _IDLE, "ec": _HATCH, "hatch": "/////"}
        axes.add_collection(PathCollection([outline], linewidths=0, **style))
        return
    # White rims separate neighbouring bars. The rims are thinner if there are many bars, because
    # rims of full width would cover thousands of narrow bars.
    rim = min(0.7, 60 / len(bars))
    axes.add_collection(PolyCollection(corners, fc=tint(kind, shade), ec="white", linewidths=rim))


def tint(kind: str, shade: int) -> str:
    """Return the colour in which a picture shows spans of the kind `kind` in the shade `shade`."""
    row = kind_of_span(kind)
    if row is None:
        return _COLORS[kind]
    return row.ink.shades[shade]


def _draw_numbers(
    axes: "Axes",
    timeline: Timeline,
    chunks: Chunks,
    x: Callable[[float], float],
    *,
    extent_s: float,
) -> None:
    """Draw the microbatch number into every bar that is wide enough, in the same size in all bars.

    In a bar that is too narrow for a horizontal number, the number is written vertically. `x`
    returns the horizontal position of a time, and the axis covers a time of `extent_s`.
    """
    points_per_s = (_WIDTH_INCHES - sum(_SIDES_INCHES)) * 72 / (extent_s or 1)
    # span -> letter size, in points, at which the microbatch number fills the span's bar, if the
    # number is written horizontally (`lying`) or vertically (`upright`)
    lying: dict[Span, float] = {}
    upright: dict[Span, float] = {}
    for span in timeline.spans:
        if span.computes:
            digits = len(str(Op.parse(span.op).microbatch))
            width = (span.end_s - span.start_s) * points_per_s - 1.5
            lying[span] = width / (0.62 * digits)
            upright[span] = min(width / 0.75, _LANE_INCHES * 0.86 * 72 / (0.62 * digits))
    sizes = [size for size in lying.values() if size >= _LEAST_LETTER]
    sizes += [upright[span] for span, size in lying.items() if size < _LEAST_LETTER]
    size = min((size for size in sizes if size >= _LEAST_LETTER), default=0.0)
    for span in lying:
        if max(lying[span], upright[span]) < _LEAST_LETTER:
            continue
        axes.text(
            x((span.start_s + span.end_s) / 2),
            timeline.ranks.index(span.rank),
            str(Op.parse(span.op).microbatch),
            ha="center",
            fontsize=min(8.5, size),
            color=_letters_on(chunks.shade_of(span))[1],
            **_TURNS[lying[span] >= _LEAST_LETTER],
        )


def _readable_unit(timeline: Timeline, extent_s: float) -> tuple[float, str]:
    """Return the unit of the time axis, which covers a time of `extent_s`: the unit's length in
    units of the timeline, and its name."""
    if timeline.time_unit != "s":
        return 1.0, timeline.time_unit
    return next((unit for unit in _TIME_UNITS if extent_s >= 2 * unit[0]), _TIME_UNITS[-1])


def fill(path: Path, write: Callable[[Path], object]) -> None:
    """Write the file `path`: call `write` with the path of a temporary file, and then rename this
    file. If writing fails, no incomplete file remains. Raises InputError if the file cannot be
    written."""
    try:
        with replacing(path) as beside:
            write(beside)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
