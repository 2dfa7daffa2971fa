"""`ptdmpi watch RUN ...`: show the progress of runs. The progress is read from the run
directories."""

import json
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ptdmpi.config import InputError
from ptdmpi.report import live
from ptdmpi.report.page.serve import Followed, PageServer
from ptdmpi.report.status import Watched
from ptdmpi.terminal.options import PATH, FiniteRange
from ptdmpi.terminal.program import Command


@click.command(cls=Command)
@click.argument("runs", nargs=-1, required=True, type=PATH)
@click.option(
    "--every",
    type=FiniteRange(0.2, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between two looks at the run.",
)
@click.option(
    "--once",
    is_flag=True,
    help="Print plain text once; this is the default if the output is not a terminal.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON once, for programs.")
@click.option("--web", is_flag=True, help="Show the page of one run in a browser on this host.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port of --web [default: any free port]."
)
def command(
    runs: tuple[Path, ...],
    *,
    every: float,
    once: bool,
    as_json: bool,
    web: bool,
    port: int | None,
) -> None:
    """Watch the run directories RUNS (such as runs/demo) until all runs are done or stopped.

    Shows the loss, tokens per second, the time left, the last checkpoint, slow ranks, the last
    validation loss, and warnings. The command only reads the files of the runs. It needs no MPI,
    torch or GPU, so it also works on a login node that shares the file system. With --web, a
    browser shows the page of `ptdmpi report`, which is updated until Ctrl-C.
    """
    if web:
        if len(runs) > 1 or once or as_json:
            raise InputError("--web shows one run, and cannot be combined with --once or --json")
        _serve(runs[0], port or 0, every)
        return
    if port is not None:
        raise InputError("--port needs --web")
    watched = [Watched(path) for path in runs]

    def statuses() -> list[dict[str, Any]]:
        """Return the present status of each run."""
        return [run.status() for run in watched]

    if as_json:
        print(json.dumps({"time": time.time(), "runs": statuses()}))
        return
    console = Console()
    if once or not console.is_terminal:
        width = None if console.is_terminal else max(console.width, 120)
        plain = Console(width=width, color_system=None, legacy_windows=False)
        plain.print(live.picture(statuses()))
        return
    try:
        live.follow(statuses, console, every)
    except KeyboardInterrupt:  # Ctrl-C ends the display, and the run continues
        return


def _serve(run: Path, port: int, every_s: float) -> None:
    """Serve the page of a run on this host until Ctrl-C. The run itself continues."""
    with PageServer(Followed(run), port, every_s) as server:
        print(f"{run} is shown at {server.address} on this host only; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
