"""The content of the page, as data for the page's script: tables, lists and texts."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptdmpi.base.disk import read_file
from ptdmpi.base.words import counted
from ptdmpi.plan.schedule.simulate import Timeline
from ptdmpi.report.live import duration
from ptdmpi.report.page.bars import step_timelines
from ptdmpi.report.page.curves import charts
from ptdmpi.report.pictures import newest_loads
from ptdmpi.report.run import RecordedRun
from ptdmpi.report.summary import rows_of, summary

LOG_LINES = 200  # number of last lines of the log
GIB = 2**30
MIB = 2**20


def content(run: RecordedRun, foreseen: Timeline | None = None) -> dict[str, Any]:
    """Return the data that the page shows below its head: the rows of the report, charts, the loads
    of the experts, timelines, the configuration, and the end of the log.

    `foreseen` is the timeline of the predicted step.
    """
    return {
        "rows": rows_of(summary(run)) if run.steps else [],
        "charts": charts(run),
        "loads": _loads(run),
        "timelines": step_timelines(run, foreseen),
        "files": _texts(run.path),
    }


def _loads(run: RecordedRun) -> dict[str, Any] | None:
    """Return the newest recorded loads of all experts, for the heat map; None without such
    records."""
    loads = newest_loads(run)
    return None if loads is None else loads._asdict()


def _texts(path: Path) -> list[tuple[str, str]]:
    """Return the pair (name of the file, text) for the configuration and for the last lines of the
    log."""
    texts = []
    for name, lines in (("config.toml", 0), ("log.txt", LOG_LINES)):
        if (path / name).is_file():
            text = read_file(path / name).decode(errors="replace").splitlines()
            texts.append((name, "\n".join(text[-lines:])))
    return texts


def head(status: dict[str, Any], problems: Sequence[str] = ()) -> dict[str, Any]:
    """Return the data for the head of the page: name, state, fraction of completed steps, tiles
    (name, text), and warnings. `status` is a result of `Watched.status`, and `problems` are texts
    about unreadable files (`RecordedRun.problems`), which become warnings."""
    under = ""
    if "layout" in status:
        under = f"{status['layout']}, {counted(status['rank_count'], 'rank')}"
    state = status["state"]
    if state == "silent":
        state = f"silent for {duration(status['silent_s'])}"
    slow = ", ".join(
        f"rank {rank['rank']} ({rank['host']}) {rank['factor']:.2f} times"
        for rank in status["slow_ranks"]
    )
    return {
        "name": status["name"],
        "under": under,
        "state": state,
        "share": min(1.0, status.get("step", 0) / status["steps"]),
        "tiles": _tiles(status),
        "warnings": [
            *dict.fromkeys((*status["problems"], *problems)),
            *([f"slow ranks: {slow}"] if slow else []),
            *status["remarks"],
        ],
        "time": time.time(),
    }


def _tiles(status: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the tiles of the head: a pair (name, text) for each number that is known."""
    if "step" not in status:
        return [("steps", f"{status['steps']:,}")]
    tiles = [
        ("step", f"{status['step']:,} of {status['steps']:,}"),
        ("loss", f"{status['loss']:.4f}"),
    ]
    if "validation_loss" in status:
        best = status["best_validation_step"]
        tiles.append(("validation loss", f"{status['validation_loss']:.4f}"))
        if best != status["validation_step"]:
            text = f"{status['best_validation_loss']:.4f}, step {best:,}"
            tiles.append(("best validation", text))
    tiles.append(("tokens/s", f"{status['tokens_per_s']:,.0f}"))
    tiles.append(("time of a step", duration(status["step_time_s"])))
    if status["mfu"] is not None:
        tiles.append(("MFU", f"{status['mfu']:.1%}"))
    tiles.append(("memory per rank", size(status["peak_memory_bytes"])))
    if status["state"] == "running" and status["left_s"]:
        tiles.append(("time left", duration(status["left_s"])))
    if status.get("checkpoint"):
        tiles.append(("checkpoint", f"step {status['checkpoint']['step']:,}"))
    return tiles


def size(number: float) -> str:
    """Return a size of memory as text: 5368709120 -> 5.0 GiB, 389021696 -> 371 MiB."""
    return f"{number / GIB:,.1f} GiB" if number >= GIB else f"{number / MIB:,.0f} MiB"
