"""`ptdmpi report RUN`: table, loss curve, timeline as planned and as measured, trace."""

import json
import shutil
import sys
from pathlib import Path

import click

from ptdmpi import report
from ptdmpi.plan.show import draw
from ptdmpi.report import compare
from ptdmpi.terminal.program import Command


@click.command(cls=Command, short_help="Table, plots and trace of a run.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--cluster", help="Predict on this one; default: what run.cluster of the run names.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def command(run: Path, cluster: str | None, as_json: bool) -> None:
    """Sum up the run directory RUN (such as runs/demo).

    Where a cluster is known (ptdmpi probe writes one of a machine), the step that is predicted on
    it stands beside the measured one. Writes loss.png, timeline.png and trace.json (for Perfetto or
    chrome://tracing) into it.
    """
    loaded = report.read(run)
    numbers = report.summary(loaded)
    foreseen = compare.foreseen(
        run, loaded.measured_config, loaded.steps[-1].get("vocab_size"), cluster
    )
    paths = report.write(loaded, foreseen)
    compared = None
    if foreseen and loaded.measured:
        compared = numbers["comparison"] = compare.comparison(loaded.measured, foreseen)
    if as_json:
        print(json.dumps({**numbers, "files": [str(path) for path in paths]}))
        return
    if loaded.measured:
        columns = min(120, shutil.get_terminal_size((120, 24)).columns)
        above = [report.compute_window(foreseen)] if foreseen else []
        measured = report.compute_window(loaded.measured)
        for timeline in (*above, report.planned(loaded), measured):
            print(draw.terminal(timeline, columns, color=sys.stdout.isatty()))
            print()
    print(report.table(numbers))
    print()
    if compared:
        print(compare.table(compared))
        print()
    for path in paths:
        print(f"wrote {path}")
