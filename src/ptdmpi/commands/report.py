"""`ptdmpi report RUN`: table, loss curve, timeline as planned and as measured, trace."""

import json
import shutil
import sys
from pathlib import Path

import click

from ptdmpi import report
from ptdmpi.config import InputError
from ptdmpi.plan.schedule.simulate import Timeline
from ptdmpi.plan.show import draw
from ptdmpi.report import compare, page, several
from ptdmpi.terminal.program import Command
from ptdmpi.terminal.say import note


@click.command(
    cls=Command, short_help="Table, plots, page and trace of a run, or several compared."
)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--cluster", help="Predict on this one; default: what run.cluster of the run names.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for pictures and trace [default: RUN; of several: the current one].",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def command(
    runs: tuple[Path, ...], cluster: str | None, output: Path | None, as_json: bool
) -> None:
    """Sum up the run directory RUNS (such as runs/demo), or compare several.

    Where a cluster is known (ptdmpi probe writes one of a machine), the step that is predicted on
    it stands beside the measured one. Writes loss.png, timeline.png, trace.json (for Perfetto or
    chrome://tracing) and report.html (all in one file) into it, or into --output DIR; a run that
    may only be read keeps its table. Several runs share one table, a list of the settings that
    differ, and comparison.png in the current directory.
    """
    if len(runs) > 1:
        _several(runs, output, as_json)
        return
    (run,) = runs
    loaded = report.read(run)
    numbers = report.summary(loaded)
    foreseen = compare.foreseen(
        run, loaded.measured_config, loaded.steps[-1].get("vocab_size"), cluster
    )
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    paths, unwritten = _written(loaded, foreseen, output)
    compared = None
    if foreseen and loaded.measured:
        compared = numbers["comparison"] = compare.comparison(loaded.measured, foreseen)
    if paths:
        shown = [path for path in paths if path.suffix == ".png"]
        html = paths[0].with_name("report.html")
        try:
            page.write(loaded, report.rows_of(numbers), shown, html)
            paths.append(html)
        except OSError as error:
            unwritten.append(f"no page: {html}: {error.strerror}; --output DIR writes it elsewhere")
    if as_json:
        print(json.dumps({**numbers, "files": [str(path) for path in paths]}))
        note_all(unwritten)
        return
    if loaded.measured:
        columns = min(120, shutil.get_terminal_size((120, 24)).columns)
        above = [report.compute_window(foreseen)] if foreseen else []
        planned = report.planned(loaded, loaded.measured)
        measured = report.compute_window(loaded.measured)
        for timeline in (*above, planned, measured):
            print(draw.terminal(timeline, columns, color=sys.stdout.isatty()))
            print()
    print(report.table(numbers))
    print()
    if compared:
        print(compare.table(compared))
        print()
    for path in paths:
        print(f"wrote {path}")
    note_all(unwritten)


def _written(
    loaded: report.Run, foreseen: Timeline | None, output: Path | None
) -> tuple[list[Path], list[str]]:
    """The files that were written, and a line on why none were: into a run of somebody else, the
    table matters more than its pictures."""
    try:
        return report.write(loaded, foreseen, output or loaded.path), []
    except InputError as error:
        if output is not None:
            raise
        return [], [f"no pictures: {error}; --output DIR draws them elsewhere"]


def note_all(lines: list[str]) -> None:
    for line in lines:
        note(line)


def _several(runs: tuple[Path, ...], output: Path | None, as_json: bool) -> None:
    loaded = [report.read(path) for path in runs]
    numbers = [report.summary(one) for one in loaded]
    drawn, unwritten = _compared(loaded, output)
    settings = several.differing(loaded)
    gap = several.largest_gap(loaded)
    if as_json:
        named = [{"path": str(path), **one} for path, one in zip(runs, numbers, strict=True)]
        files = [str(path) for path in drawn]
        print(json.dumps({"runs": named, "settings": settings, "gap": gap, "files": files}))
        note_all(unwritten)
        return
    print(several.table(loaded, numbers))
    if gap:
        print(
            f"\nloss over {gap['steps']:,} steps in common: {gap['mean']:.3g} apart in the mean, "
            f"{gap['largest']:.3g} at step {gap['at_step']:,}"
        )
    if settings:
        print(f"\n{several.settings_table(loaded, settings)}")
    for path in drawn:
        print(f"\nwrote {path}")
    note_all(unwritten)


def _compared(loaded: list[report.Run], output: Path | None) -> tuple[list[Path], list[str]]:
    """The picture that was written, or a line on why it was not: the table matters more."""
    drawn = (output or Path()) / "comparison.png"
    try:
        drawn.parent.mkdir(parents=True, exist_ok=True)
        several.picture(loaded, drawn)
    except OSError as error:
        if output is not None:
            raise InputError(f"--output {output}: {error.strerror}") from None
        return [], [f"no picture: {drawn}: {error.strerror}; --output DIR draws it elsewhere"]
    return [drawn], []
