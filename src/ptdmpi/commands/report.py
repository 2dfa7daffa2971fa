"""`ptdmpi report RUN`: table, loss curve, timeline as planned and as measured, trace."""

import json
import shutil
import sys
from pathlib import Path

import click

from ptdmpi import report
from ptdmpi.plan import draw


@click.command(short_help="Table, plots and trace of a run.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def command(run: Path, as_json: bool) -> None:
    """Sum up the run directory RUN (such as runs/demo).

    Writes loss.png, timeline.png and trace.json (for Perfetto or chrome://tracing) into it.
    """
    loaded = report.read(run)
    numbers = report.summary(loaded)
    paths = report.write(loaded)
    if as_json:
        print(json.dumps({**numbers, "files": [str(path) for path in paths]}))
        return
    if loaded.measured:
        columns = min(120, shutil.get_terminal_size((120, 24)).columns)
        for timeline in (report.planned(loaded), report.compute_window(loaded.measured)):
            print(draw.terminal(timeline, columns, color=sys.stdout.isatty()))
            print()
    print(report.table(numbers))
    print()
    for path in paths:
        print(f"wrote {path}")
