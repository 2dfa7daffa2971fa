"""Pictures: golden ones as text, the files' form, and that failed drawing leaves nothing."""

import bisect
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from ptdmpi.config import InputError
from ptdmpi.plan.schedule.orders import build
from ptdmpi.plan.schedule.simulate import Costs, Span, Timeline, simulate
from ptdmpi.plan.show import draw
from ptdmpi.plan.show.draw import _legend, figure, terminal
from ptdmpi.plan.show.draw_memory import drawn_ranks, envelope
from ptdmpi.plan.show.trace import chrome_trace

LEGEND = "number: microbatch, > forward, < backward, . idle"
LEGEND_FORWARD = LEGEND.replace("< backward, ", "")  # kinds of ops that occur
GOLDEN = {
    ("gpipe", 3, 1, 3): """
rank 0 012......0<1<2<
rank 1 .012...0<1<2<..
rank 2 ..0120<1<2<....""",
    ("gpipe", 2, 2, 2): """
rank 0 0101...0<1<0<1<
rank 1 .01010<1<0<1<..""",
    ("1f1b", 4, 1, 5): """
rank 0 0123......0<41<.2<.3<.4<
rank 1 .012....0<31<42<.3<.4<..
rank 2 ..01..0<21<32<43<.4<....
rank 3 ...00<11<22<33<44<......""",
    ("interleaved", 2, 2, 4): """
rank 0 01012.0<31<20<31<.2<.3<2<3<
rank 1 .0100<11<20<31<22<33<2<3<..""",
    ("interleaved", 2, 2, 3): """
rank 0 01012.0<.1<20<1<.2<..2<
rank 1 .0100<11<20<1<22<..2<..""",
    ("interleaved", 1, 2, 2): """
rank 0 000<10<11<1<""",
    ("forward", 2, 2, 3): """
rank 0 01012.2.
rank 1 .01012.2""",
}
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def simulated(*schedule, forward_s=1.0, backward_s=2.0):
    return simulate(build(*schedule), Costs(forward_s, backward_s))


@pytest.mark.parametrize("schedule", GOLDEN)
def test_golden_pictures(schedule):
    timeline = simulated(*schedule)
    width = len("rank 0 ") + int(timeline.makespan_s)
    legend = LEGEND_FORWARD if schedule[0] == "forward" else LEGEND
    assert "\n" + terminal(timeline, width, color=False) == f"{GOLDEN[schedule]}\n{legend}"


def test_a_wide_terminal_draws_every_op_wider():
    for width in (25, 27):  # 2 columns per unit of time, whole ones only
        assert terminal(simulated("1f1b", 2, 1, 2), width, color=False).splitlines()[:2] == [
            "rank 0 0>1>....0<<<..1<<<",
            "rank 1 ..0>0<<<1>1<<<....",
        ]


@pytest.mark.parametrize("width", [20, 40, 64, 100, 120])
@pytest.mark.parametrize("color", [True, False])
def test_no_line_is_wider_than_asked_and_color_changes_no_width(width, color):
    text = ANSI.sub("", terminal(simulated("interleaved", 4, 2, 8), width, color=color))
    lanes = [line for line in text.splitlines() if line.startswith("rank")]
    assert len(lanes) == 4
    assert len({len(lane) for lane in lanes}) == 1
    assert len(lanes[0]) <= width


def test_color_is_used_only_when_asked_for():
    timeline = simulated("interleaved", 4, 2, 8)
    assert not ANSI.search(terminal(timeline, 100, color=False))
    colors = set(ANSI.findall(terminal(timeline, 100, color=True)))
    assert len(colors) == 5  # forward and backward of two chunks, and the reset


def test_numbers_that_do_not_fit_are_cut_short_and_the_stated_width_shows_them():
    timeline = simulated("1f1b", 4, 1, 16)
    medium, narrow = terminal(timeline, 70, color=False), terminal(timeline, 50, color=False)
    assert "rank 0 0123......0<41<52<63<74<85<96<07<18" in medium
    assert "numbers modulo 10" in medium
    assert "too narrow for microbatch numbers" in narrow
    stated = int(re.search(r"about (\d+) columns", narrow)[1])
    full = terminal(timeline, stated, color=False)
    assert "15>15<<<" in full.replace("> ", "")
    assert "(" not in full


def test_numbers_stand_upright_in_narrow_boxes():
    """Microbatches of two digits are numbered too, where a box is as narrow as a letter is high."""
    written = []

    class Axes:
        def text(self, x, y, number, **look):
            written.append((number, look["rotation"]))

    timeline = simulated("1f1b", 4, 1, 44)
    draw._draw_numbers(Axes(), timeline, draw.Chunks(timeline), float, extent_s=timeline.makespan_s)
    assert {number for number, _ in written} == {str(number) for number in range(44)}
    assert {rotation for _, rotation in written} == {"horizontal", "vertical"}


def test_other_work_has_a_letter_and_a_place_in_the_legend():
    spans = (Span(0, "forward", "F0.0", 10.0, 12.0), Span(0, "optimizer", "", 12.0, 14.0))
    text = terminal(Timeline(spans, title="measured"), 15, color=False)
    assert text.splitlines() == ["measured", "rank 0 0>>>oooo", f"{LEGEND_FORWARD}, o optimizer"]


def test_nothing_to_draw_is_drawn_as_nothing():
    assert terminal(Timeline(()), 80, color=False) == "number: microbatch, . idle"


@pytest.mark.parametrize("suffix", [pytest.param("png", marks=pytest.mark.long), "svg"])
def test_figures_are_whole_and_repeatable(tmp_path, suffix):
    planned = replace(simulated("interleaved", 4, 2, 8), title="planned <1>")
    measured = Timeline((*planned.spans, Span(0, "reduce", "", 57.0, 60.0)), title="measured")
    for name in ("a", "b"):
        figure([planned, measured], tmp_path / f"{name}.{suffix}")
    first = (tmp_path / f"a.{suffix}").read_bytes()
    assert first == (tmp_path / f"b.{suffix}").read_bytes()
    if suffix == "svg":
        assert ElementTree.fromstring(first).tag.endswith("svg")
    else:
        assert first.startswith(b"\x89PNG") and first.rstrip().endswith(b"IEND\xaeB\x60\x82")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"a.{suffix}", f"b.{suffix}"]


def test_the_legend_names_each_shade_once_and_has_room():
    """12 chunks have 4 shades: 24 entries would cover the time axis."""
    entries = _legend([simulated("interleaved", 2, 12, 4)])
    words = [entry.get_label() for entry in entries]
    assert words[:4] == [
        "forward, chunks 0 to 3",
        "forward, chunks 4 to 7",
        "forward, chunks 8 to 10",
        "forward, chunk 11",
    ]
    # idle and waiting for input share one: the second is hatched
    assert len({entry.get_facecolor() for entry in entries}) == 9 == len(entries) - 1
    words = [entry.get_label() for entry in _legend([simulated("1f1b", 2, 1, 2)])]
    assert words == ["forward", "backward", "idle, or not measured", "waiting for input"]


def test_a_line_of_many_moments_keeps_its_peaks_and_plateaus():
    """Above and below the line at every moment, and not where nothing happens."""
    moments = [float(i) for i in range(2000)] + [3000.0, 3001.0]
    amounts = [10.0 * (i % 2) for i in range(2000)] + [70.0, 5.0]
    starts, low, high = envelope(moments, amounts)
    assert len(starts) < 1000 and starts == sorted(starts)
    for moment, amount in zip(moments, amounts, strict=True):
        i = bisect.bisect_right(starts, moment) - 1
        assert low[i] <= amount <= high[i]
    i = bisect.bisect_right(starts, 2500.0) - 1
    assert low[i] == high[i] == amounts[1999]
    assert envelope([0.0, 1.0], [2.0, 3.0]) == ([0.0, 1.0], [2.0, 3.0], [2.0, 3.0])
    assert drawn_ranks([1.0] * 8) == list(range(8))
    assert drawn_ranks([*range(40), 99, *range(23)]) == [0, 16, 32, 40, 47, 63]


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path):
    timeline = simulated("1f1b", 2, 1, 2)
    for bad, message in ((tmp_path / "a.jpg", "are .png or .svg"), (tmp_path / "a", ".png or")):
        with pytest.raises(InputError, match=message):
            figure([timeline], bad)
    with pytest.raises(InputError, match="cannot be written: No such file"):
        figure([timeline], tmp_path / "missing" / "a.png")
    (tmp_path / "taken.svg").mkdir()
    with pytest.raises(InputError, match="cannot be written: Is a directory"):
        figure([timeline], tmp_path / "taken.svg")
    assert [p.name for p in tmp_path.iterdir()] == ["taken.svg"]


def test_the_trace_holds_every_span_in_microseconds(tmp_path):
    simulated_s = simulated("1f1b", 2, 1, 2, forward_s=0.25, backward_s=0.5)
    late = Timeline(
        tuple(replace(s, start_s=s.start_s + 9, end_s=s.end_s + 9) for s in simulated_s.spans)
    )
    chrome_trace(late, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"} == {
        (0, "rank 0"),
        (1, "rank 1"),
    }
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(late.spans)
    assert {"pid": 1, "cat": "backward", "name": "B1.0", "ts": 5e5, "dur": 5e5}.items() <= next(
        e for e in complete if e["name"] == "B1.0"
    ).items()
    assert any(e["name"] == "receive B1.0" and e["pid"] == 0 for e in complete)
