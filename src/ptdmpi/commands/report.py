"""`ptdmpi report RUN`: table, loss curve, timeline as planned and as measured, trace."""

import json
import shutil
import sys
from pathlib import Path

import click

from ptdmpi import report
from ptdmpi.plan.show import draw
from ptdmpi.report import compare, page, several
from ptdmpi.terminal.program import Command


@click.command(
    cls=Command, short_help="Table, plots, page and trace of a run, or several compared."
)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--cluster", help="Predict on this one; default: what run.cluster of the run names.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def command(runs: tuple[Path, ...], cluster: str | None, as_json: bool) -> None:
    """Sum up the run directory RUNS (such as runs/demo), or compare several.

    Where a cluster is known (ptdmpi probe writes one of a machine), the step that is predicted on
    it stands beside the measured one. Writes loss.png, timeline.png, trace.json (for Perfetto or
    chrome://tracing) and report.html (all in one file) into it. Several runs share one table, and
    comparison.png beside the first of them.
    """
    if len(runs) > 1:
        _several(runs, as_json)
        return
    (run,) = runs
    loaded = report.read(run)
    numbers = report.summary(loaded)
    foreseen = compare.foreseen(
        run, loaded.measured_config, loaded.steps[-1].get("vocab_size"), cluster
    )
    paths = report.write(loaded, foreseen)
    compared = None
    if foreseen and loaded.measured:
        compared = numbers["comparison"] = compare.comparison(loaded.measured, foreseen)
    paths.append(run / "report.html")
    rows = report.rows_of(numbers)
    page.write(loaded, rows, [path for path in paths if path.suffix == ".png"], paths[-1])
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


def _several(runs: tuple[Path, ...], as_json: bool) -> None:
    loaded = [report.read(path) for path in runs]
    numbers = [report.summary(one) for one in loaded]
    drawn = runs[0].absolute().parent / "comparison.png"
    several.picture(loaded, drawn)
    gap = several.largest_gap(loaded)
    if as_json:
        named = [{"path": str(path), **one} for path, one in zip(runs, numbers, strict=True)]
        print(json.dumps({"runs": named, "gap": gap, "files": [str(drawn)]}))
        return
    print(several.table(loaded, numbers))
    if gap:
        print(
            f"\nloss over {gap['steps']:,} steps in common: {gap['mean']:.3g} apart in the mean, "
            f"{gap['largest']:.3g} at step {gap['at_step']:,}"
        )
    print(f"\nwrote {drawn}")
