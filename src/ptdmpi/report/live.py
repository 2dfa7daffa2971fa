"""The progress of runs on a terminal. A single run is shown as a few lines in a frame, and several
runs are shown as a table."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ptdmpi.base.words import counted, printable_line
from ptdmpi.report.status import binned
from ptdmpi.sinks.record import task_score

STATES = {
    "running": "green",
    "starting": "cyan",
    "done": "bold green",
    "stopped": "yellow",
    "silent": "bold red",
}
# Headings of the table's columns after the name and the state. The column with an empty heading
# shows the loss curve.
COLUMNS = ("step", "loss", "", "validation", "tokens/s", "mfu", "left", "saved")
BAR_COLUMNS = 40
BARS = "▁▂▃▄▅▆▇█"
MIB = 2**20
HOUR_S = 3600
MINUTE_S = 60


def follow(look: Callable[[], list[dict[str, Any]]], console: Console, every_s: float) -> None:
    """Redraw the display every `every_s` seconds, until all runs are done or stopped. Raises
    KeyboardInterrupt if the user presses Ctrl-C.

    `look` is a function that returns the status of each run.
    """
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            statuses = look()
            live.update(picture(statuses), refresh=True)
            if all(status["state"] in ("done", "stopped") for status in statuses):
                return
            time.sleep(every_s)


def picture(statuses: Sequence[dict[str, Any]]) -> RenderableType:
    """Return a drawing for the terminal that shows the statuses of runs. The statuses are results
    of `Watched.status`."""
    statuses = [_printable(status) for status in statuses]
    if len(statuses) == 1:
        return block(statuses[0])
    remarks = [
        Text.assemble((f"{status['name']}: ", "bold"), line)
        for status in statuses
        for line in _remarks(status)
    ]
    return Group(table(statuses), *remarks)


def _printable(value: Any) -> Any:
    """Return a copy of a status in which control characters are replaced by printable escapes.

    A log, a host name or a path may contain escape sequences, which a terminal would execute.
    """
    if isinstance(value, str):
        return printable_line(value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return value


def block(status: dict[str, Any]) -> RenderableType:
    """Return the drawing of one run: a few lines in a frame."""
    lines: list[RenderableType] = []
    if "step" in status:
        step = status["step"]
        steps = status["steps"]
        share = min(1.0, step / steps)
        bar = "━" * round(share * BAR_COLUMNS)
        lines.append(
            Text.assemble(
                f"step {step:,}/{steps:,}  ",
                (bar, "green"),
                ("─" * (BAR_COLUMNS - len(bar)), "bright_black"),
                f"  {share:.0%}  {_left(status)}",
            )
        )
        drawn = sparkline(status["losses"])
        lines.append(Text(f"loss {status['loss']:.4f}  {drawn}  {_validation(status)}".rstrip()))
        step_s = duration(status["step_time_s"])
        mfu = "" if status["mfu"] is None else f"mfu {_mfu(status)}  "
        lines.append(
            Text(
                f"{status['tokens_per_s']:,.0f} tokens/s  {step_s} a step  "
                f"{status['model_tflops_per_rank']:.3g} TFLOP/s/rank  {mfu}"
                f"memory {status['peak_memory_bytes'] / MIB:,.0f} MiB"
            )
        )
        rate = f"learning rate {status['learning_rate']:.2e}"
        lines.append(Text(f"{rate}  grad norm {status['grad_norm']:.3f}"))
    if "tasks" in status:
        lines.append(Text(f"tasks {_tasks(status)}"))
    lines.append(Text(f"checkpoint {_checkpoint(status)}"))
    lines += [Text(line, style="yellow") for line in _remarks(status)]
    title = Text.assemble((status["name"], "bold"), "  ", _state(status))
    if "layout" in status:
        title.append(f"  {status['layout']}, {counted(status['rank_count'], 'rank')}")
    return Panel(Group(*lines), title=title, title_align="left", expand=False)


def table(statuses: Sequence[dict[str, Any]]) -> Table:
    """Return the drawing of several runs, with one line for each run."""
    drawn = Table(box=None, pad_edge=False)
    for head in ("run", "state", *COLUMNS):
        left = head in ("run", "state", "")
        drawn.add_column(head, justify="left" if left else "right", no_wrap=True)
    for status in statuses:
        cells = _cells(status)
        drawn.add_row(status["name"], _state(status), *(cells.get(head, "") for head in COLUMNS))
    return drawn


def _cells(status: dict[str, Any]) -> dict[str, str]:
    """Return the cells in the table row of a run, as a dict: heading (see COLUMNS) -> text. Cells
    with unknown values are left out."""
    cells = {"saved": "none"}
    if "checkpoint" in status:
        saved = status["checkpoint"]
        cells["saved"] = "unknown" if saved is None else f"{saved['step']:,}"
    if "step" in status:
        cells |= {
            "step": f"{status['step']:,}/{status['steps']:,}",
            "loss": f"{status['loss']:.4f}",
            "": sparkline(binned(status["losses"], 10)),
            "tokens/s": f"{status['tokens_per_s']:,.0f}",
            "mfu": _mfu(status),
        }
        if status["left_s"]:
            cells["left"] = duration(status["left_s"])
    if "validation_loss" in status:
        cells["validation"] = f"{status['validation_loss']:.4f}"
    return cells


def _state(status: dict[str, Any]) -> Text:
    state = status["state"]
    text = state
    if state == "silent":
        text = f"silent for {duration(status['silent_s'])}"
    return Text(text, style=STATES[state])


def _left(status: dict[str, Any]) -> str:
    if status["state"] != "running" or not status["left_s"]:
        return ""
    ends = time.localtime(time.time() + status["left_s"])
    clock = "%d %b %H:%M" if status["left_s"] > 12 * HOUR_S else "%H:%M"
    return f"left {duration(status['left_s'])}, until {time.strftime(clock, ends)}"


def _validation(status: dict[str, Any]) -> str:
    if "validation_loss" not in status:
        return ""
    text = f"validation {status['validation_loss']:.4f} (step {status['validation_step']}"
    best_step = status["best_validation_step"]
    if best_step != status["validation_step"]:
        text += f"; best {status['best_validation_loss']:.4f}, step {best_step}"
    return text + ")"


def _tasks(status: dict[str, Any]) -> str:
    scores = ((path, *task_score(values)) for path, values in status["tasks"].items())
    shown = ", ".join(f"{path} {name} {score:.1%}" for path, name, score in scores)
    return f"{shown} (step {status['tasks_step']})"


def _checkpoint(status: dict[str, Any]) -> str:
    if "checkpoint" not in status:
        return "none yet"
    checkpoint = status["checkpoint"]
    if checkpoint is None:
        return "unknown"
    return f"{checkpoint['name']}, {duration(checkpoint['age_s'])} ago"


def _mfu(status: dict[str, Any]) -> str:
    """Return the model FLOPs utilization (MFU) in percent, as text. Return an empty text if the
    peak rate of the device is unknown."""
    return "" if status["mfu"] is None else f"{status['mfu']:.1%}"


def _remarks(status: dict[str, Any]) -> list[str]:
    """Return the lines that are shown below a run: a line for each file that cannot be read
    completely, a line about slow ranks (if there are slow ranks), and the newest warnings in the
    log."""
    slow = ", ".join(
        f"rank {rank['rank']} ({rank['host']}) {rank['factor']:.2f} times"
        for rank in status["slow_ranks"]
    )
    slow_ranks = [f"slow ranks: {slow}"] if slow else []
    return [*status["problems"], *slow_ranks, *status["remarks"]]


def sparkline(values: Sequence[float]) -> str:
    """Return a text that shows the values as bars with eight different heights, one character for
    each value. A value that is not finite is shown as a space."""
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return ""
    low = min(finite)
    span = (max(finite) - low) or 1.0
    bars = ""
    for value in values:
        bars += BARS[round((value - low) / span * 7)] if abs(value) < float("inf") else " "
    return bars


def duration(seconds: float) -> str:
    """Return a time in seconds as text: 0.25 -> 250 ms, 65 -> 1:05, 3725 -> 1:02:05, 200000 -> 2 d
    7 h."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < MINUTE_S:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), MINUTE_S)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours}:{minute:02d}:{second:02d}"
    return f"{minute}:{second:02d}"
