"""Where runs stand, for the eye: one run as a block, several as a table; colours on a terminal."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ptdmpi.base.words import counted
from ptdmpi.report.status import binned
from ptdmpi.sinks.record import task_score

STATES = {
    "running": "green",
    "starting": "cyan",
    "done": "bold green",
    "stopped": "yellow",
    "silent": "bold red",
}
BAR_COLUMNS = 40
BARS = "▁▂▃▄▅▆▇█"
MIB, HOUR_S, MINUTE_S = 2**20, 3600, 60


def follow(look: Callable[[], list[dict[str, Any]]], console: Console, every_s: float) -> None:
    """Draw in place until all runs are done or stopped, or Ctrl-C."""
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            statuses = look()
            live.update(picture(statuses), refresh=True)
            if all(status["state"] in ("done", "stopped") for status in statuses):
                return
            time.sleep(every_s)


def picture(statuses: Sequence[dict[str, Any]]) -> RenderableType:
    """What is drawn of what `Watched.status` says."""
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
    """Return a status in which control characters are written out: a log, a host name or a path may
    hold escape sequences, which a terminal would obey."""
    if isinstance(value, str):
        return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return value


def block(status: dict[str, Any]) -> RenderableType:
    """One run in some lines."""
    lines: list[RenderableType] = []
    if "step" in status:
        step, steps = status["step"], status["steps"]
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
        lines.append(
            Text(
                f"{status['tokens_per_s']:,.0f} tokens/s  {step_s} a step  "
                f"{status['model_tflops_per_rank']:.3g} TFLOP/s/rank  {_mfu(status, 'mfu ', '  ')}"
                f"memory {status['peak_memory_bytes'] / MIB:,.0f} MiB"
            )
        )
        rate, norm = status["learning_rate"], status["grad_norm"]
        lines.append(Text(f"learning rate {rate:.2e}  grad norm {norm:.3f}"))
    if "tasks" in status:
        lines.append(Text(f"tasks {_tasks(status)}"))
    lines.append(Text(f"checkpoint {_checkpoint(status)}"))
    lines += [Text(line, style="yellow") for line in _remarks(status)]
    title = Text.assemble((status["name"], "bold"), "  ", _state(status))
    if "layout" in status:
        title.append(f"  {status['layout']}, {counted(status['rank_count'], 'rank')}")
    return Panel(Group(*lines), title=title, title_align="left", expand=False)


def table(statuses: Sequence[dict[str, Any]]) -> Table:
    """Several runs, one to a line."""
    drawn = Table(box=None, pad_edge=False)
    heads = ("run", "state", "step", "loss", "", "validation", "tokens/s", "mfu", "left", "saved")
    for head in heads:
        left = head in ("run", "state", "")
        drawn.add_column(head, justify="left" if left else "right", no_wrap=True)
    for status in statuses:
        row = [
            status["name"],
            _state(status),
            "",
            "",
            "",
            "",
            "",
            "",
            "",
            _checkpoint(status, True),
        ]
        if "step" in status:
            row[2] = f"{status['step']:,}/{status['steps']:,}"
            row[3:5] = f"{status['loss']:.4f}", sparkline(binned(status["losses"], 10))
            row[6:8] = f"{status['tokens_per_s']:,.0f}", _mfu(status)
            row[8] = duration(status["left_s"]) if status["left_s"] else ""
        if "validation_loss" in status:
            row[5] = f"{status['validation_loss']:.4f}"
        drawn.add_row(*row)
    return drawn


def _state(status: dict[str, Any]) -> Text:
    state = status["state"]
    text = f"silent for {duration(status['silent_s'])}" if state == "silent" else state
    return Text(text, style=STATES[state])


def _left(status: dict[str, Any]) -> str:
    if status["state"] != "running" or not status["left_s"]:
        return ""
    ends = time.localtime(time.time() + status["left_s"])
    far = "%d %b %H:%M" if status["left_s"] > 12 * HOUR_S else "%H:%M"
    return f"left {duration(status['left_s'])}, until {time.strftime(far, ends)}"


def _validation(status: dict[str, Any]) -> str:
    if "validation_loss" not in status:
        return ""
    text = f"validation {status['validation_loss']:.4f} (step {status['validation_step']}"
    if status["best_validation_step"] != status["validation_step"]:
        best, step = status["best_validation_loss"], status["best_validation_step"]
        text += f"; best {best:.4f}, step {step}"
    return text + ")"


def _tasks(status: dict[str, Any]) -> str:
    scores = ((path, *task_score(values)) for path, values in status["tasks"].items())
    shown = ", ".join(f"{path} {name} {score:.1%}" for path, name, score in scores)
    return f"{shown} (step {status['tasks_step']})"


def _checkpoint(status: dict[str, Any], short: bool = False) -> str:
    if "checkpoint" not in status:
        return "none" if short else "none yet"
    found = status["checkpoint"]
    if short:
        return f"{found['step']:,}"
    return f"{found['name']}, {duration(found['age_s'])} ago"


def _mfu(status: dict[str, Any], before: str = "", behind: str = "") -> str:
    """Nothing where the peak of the device is not known."""
    return "" if status["mfu"] is None else f"{before}{status['mfu']:.1%}{behind}"


def _remarks(status: dict[str, Any]) -> list[str]:
    """Slow ranks first, then what the log warns of."""
    slow = ", ".join(
        f"rank {one['rank']} ({one['host']}) {one['factor']:.2f} times"
        for one in status["slow_ranks"]
    )
    return [*([f"slow ranks: {slow}"] if slow else []), *status["remarks"]]


def sparkline(values: Sequence[float]) -> str:
    """Heights of eight steps; what is no number is a blank."""
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    heights = [round((value - low) / span * 7) if value in finite else None for value in values]
    return "".join(" " if height is None else BARS[height] for height in heights)


def duration(seconds: float) -> str:
    """0.25 -> 250 ms, 65 -> 1:05, 3725 -> 1:02:05, 200000 -> 2 d 7 h."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < MINUTE_S:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), MINUTE_S)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
