"""`ptdmpi watch RUN ...`: where runs stand, from their directories; without MPI, torch or a GPU."""

import json
import time
from pathlib import Path

import click
from rich.console import Console

from ptdmpi.report import live
from ptdmpi.report.status import Watched
from ptdmpi.terminal.program import Command


@click.command(cls=Command, short_help="Where runs stand, drawn in place.")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--every", type=click.FloatRange(0.2, 3600), default=2.0, show_default=True)
@click.option("--once", is_flag=True, help="Once, as plain text; so it is without a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON once, for programs.")
def command(runs: tuple[Path, ...], every: float, once: bool, as_json: bool) -> None:
    """Watch the run directories RUNS (such as runs/demo) until they are done or stopped.

    Loss, rate, time left, the last checkpoint, slow ranks, validation, warnings. It only reads,
    so a login node that sees the files is enough.
    """
    watched = [Watched(path) for path in runs]
    if as_json:
        statuses = [one.status() for one in watched]
        print(json.dumps({"time": time.time(), "runs": statuses}))
        return
    console = Console()
    if once or not console.is_terminal:
        width = None if console.is_terminal else max(console.width, 120)
        plain = Console(width=width, color_system=None, legacy_windows=False)
        plain.print(live.picture([one.status() for one in watched]))
        return
    try:
        live.follow(lambda: [one.status() for one in watched], console, every)
    except KeyboardInterrupt:
        return
