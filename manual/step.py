"""Draw a training step: the parts of a step, and the programs of a small pipeline with their
messages."""

from manual.step_path import PARTS
from manual.svg import GREEN, GREY, INK, PALE, Drawing, Style
from ptdmpi.plan.schedule.ops import OP_KINDS, Op
from ptdmpi.plan.schedule.orders import build
from ptdmpi.plan.schedule.program import Program, Send, programs
from ptdmpi.plan.schedule.simulate import Costs, Interval, execute

TRANSFER_S = 0.4
KIND, PIPELINE, VIRTUAL, MICROBATCHES = "1f1b", 2, 1, 3
WIDTH, MARGIN, LANE, LEFT, LAST = 980.0, 16.0, 86.0, 92.0, 138.0
TOP = 190.0


def drawing() -> str:
    """Return the picture as SVG."""
    schedule = build(KIND, PIPELINE, VIRTUAL, MICROBATCHES)
    costs = Costs(forward_s=1.0, backward_s=2.0, transfer_s=TRANSFER_S)
    times = execute(schedule, costs)
    makespan_s = max(interval.end_s for interval in times.values())
    scale = (WIDTH - MARGIN - LEFT - LAST - 8) / makespan_s
    times = {op: Interval(time.start_s * scale, time.end_s * scale) for op, time in times.items()}
    every = programs(schedule)
    height = TOP + len(every) * LANE + 30 + 22 * len(every) + MARGIN
    picture = Drawing(WIDTH, height)
    _parts(picture)
    title = f"The engine's part: {KIND} on {PIPELINE} pipeline ranks, {MICROBATCHES} microbatches"
    picture.text(MARGIN, TOP - 22, title, Style(size=14, weight="bold"))
    for rank, program in enumerate(every):
        _lane(picture, rank, schedule.orders[rank], times)
        _messages(picture, rank, program, times, TRANSFER_S * scale)
        actions = "  ·  ".join(str(action) for action in program)
        y = TOP + len(every) * LANE + 30 + 22 * rank
        picture.text(MARGIN, y, f"program of rank {rank}:  {actions}", Style(size=11))
    return picture.svg()


def _parts(picture: Drawing) -> None:
    """Draw the parts of a step as a row of boxes, each with the name of the part and its files."""
    picture.text(MARGIN, MARGIN + 12, "One step, part by part", Style(size=14, weight="bold"))
    width = (WIDTH - 2 * MARGIN) / len(PARTS)
    for number, part in enumerate(PARTS):
        x, y = MARGIN + number * width, MARGIN + 24
        picture.box((x, y, width - 16, 104), PALE, stroke="#c9d4e5")
        picture.text(x + 8, y + 17, part.name, Style(size=13, weight="bold"))
        for line, name in enumerate(part.files):
            picture.text(x + 8, y + 34 + 15 * line, name, Style(size=9.5, color=GREY))
        if number:
            picture.arrow((x - 16, y + 52), (x - 1, y + 52), INK)


def _lane(picture: Drawing, rank: int, order: tuple[Op, ...], times: dict[Op, Interval]) -> None:
    y = TOP + rank * LANE
    picture.text(MARGIN, y + 30, f"rank {rank}", Style(size=13, weight="bold"))
    for op in order:
        start, end = times[op].start_s, times[op].end_s
        place = (LEFT + start, y + 8, (end - start) - 2, 36.0)
        picture.box(place, OP_KINDS[op.kind].ink.shades[1])
        white = Style(size=12, color="#ffffff", weight="bold", anchor="middle")
        picture.text(place[0] + place[2] / 2, y + 31, str(op), white)
    end = LEFT + max(interval.end_s for interval in times.values())
    picture.box((end + 8, y + 8, LAST, 36), GREEN)
    white = Style(size=11, color="#ffffff", weight="bold", anchor="middle")
    picture.text(end + 8 + LAST / 2, y + 31, "sums, norm, update", white)


def _messages(
    picture: Drawing, rank: int, program: Program, times: dict[Op, Interval], width: float
) -> None:
    """Draw an arrow of horizontal length `width` for each message that the rank sends. The arrow
    begins at the end of the op whose output is sent."""
    for action in program:
        if isinstance(action, Send):
            below = action.peer > rank
            start = LEFT + times[action.op].end_s - 3
            y = TOP + rank * LANE + (46 if below else 6)
            to = TOP + action.peer * LANE + (6 if below else 46)
            picture.arrow((start, y), (start + width, to), GREY)
