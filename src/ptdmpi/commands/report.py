"""`ptdmpi report RUN`: table, loss curve, planned and measured timeline, trace."""

import json
import shutil
import sys
from pathlib import Path

import click

from ptdmpi import report
from ptdmpi.base.say import note, warn
from ptdmpi.base.words import printable
from ptdmpi.config import InputError
from ptdmpi.plan.schedule.simulate import Timeline
from ptdmpi.plan.show import draw
from ptdmpi.report import compare, page, several
from ptdmpi.terminal.options import PATH, NamedPath
from ptdmpi.terminal.program import Command


@click.command(cls=Command)
@click.argument("runs", nargs=-1, required=True, type=PATH)
@click.option("--cluster", help="Cluster for the prediction; default: the run's key run.cluster.")
@click.option(
    "--output",
    type=NamedPath(path_type=Path, file_okay=False),
    help="Directory for pictures and trace [default: the run directory; for several runs, the "
    "current directory].",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def command(
    runs: tuple[Path, ...], cluster: str | None, output: Path | None, as_json: bool
) -> None:
    """Summarize the run directory RUNS (such as runs/demo), or compare several runs.

    Writes loss.png, timeline.png, trace.json (for Perfetto or chrome://tracing) and report.html (an
    interactive page in one file) into the run directory, or into --output DIR. If the directory is
    read-only, only the table is printed. With a cluster file (written, for example, by ptdmpi
    probe), the command compares the measured step with the predicted step. For several runs, the
    command prints one table and a list of the settings that differ, and writes comparison.png to
    the current directory.
    """
    if len(runs) > 1:
        _several(runs, output, as_json)
        return
    _one(runs[0], cluster, output, as_json)


def _one(run: Path, cluster: str | None, output: Path | None, as_json: bool) -> None:
    """Print and write the report on one run."""
    loaded = report.read(run)
    numbers = report.summary(loaded)
    _warn_of(loaded)
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
        html = paths[0].with_name("report.html")
        try:
            page.write(loaded, foreseen, html)
            paths.append(html)
        except OSError as error:
            unwritten.append(f"no page: {html}: {error.strerror}; --output DIR writes it elsewhere")
    if as_json:
        print(json.dumps({**numbers, "files": [str(path) for path in paths]}))
        note_all(unwritten)
        return
    if loaded.measured:
        _print_timelines(report.timelines(loaded, loaded.measured, foreseen))
    print(printable(report.table(numbers)))
    print()
    if compared:
        print(printable(compare.table(compared)))
        print()
    for path in paths:
        print(f"wrote {path}")
    note_all(unwritten)


def _print_timelines(timelines: list[Timeline]) -> None:
    """Draw timelines as text, one after the other."""
    columns = min(120, shutil.get_terminal_size((120, 24)).columns)
    for timeline in timelines:
        print(draw.terminal(timeline, columns, color=sys.stdout.isatty()))
        print()


def _written(
    loaded: report.RecordedRun, foreseen: Timeline | None, output: Path | None
) -> tuple[list[Path], list[str]]:
    """Write the pictures and the trace of a run. Return two lists: the paths of the written files,
    and a line that says why no pictures could be written. One of them is empty.

    By default, an error does not end the command, because another user's run is often read-only.
    But raise InputError if the directory `output` was given and cannot be written.
    """
    try:
        return report.write(loaded, foreseen, output or loaded.path), []
    except InputError as error:
        if output is not None:
            raise
        return [], [f"no pictures: {error}; --output DIR draws them elsewhere"]


def _warn_of(run: report.RecordedRun) -> None:
    """Print a warning for each file of a run that cannot be read completely."""
    for problem in run.problems:
        warn(f"{run.path}/{problem}")


def note_all(lines: list[str]) -> None:
    """Print each line as a note on stderr."""
    for line in lines:
        note(line)


def _several(runs: tuple[Path, ...], output: Path | None, as_json: bool) -> None:
    """Print and draw the comparison of several runs."""
    loaded = [report.read(path) for path in runs]
    numbers = [report.summary(run) for run in loaded]
    for run in loaded:
        _warn_of(run)
    drawn, unwritten = _compared(loaded, output)
    settings = several.differing(loaded)
    gap = several.largest_gap(loaded)
    if as_json:
        named = [
            {"path": str(path), **summary} for path, summary in zip(runs, numbers, strict=True)
        ]
        files = [str(path) for path in drawn]
        print(json.dumps({"runs": named, "settings": settings, "gap": gap, "files": files}))
        note_all(unwritten)
        return
    print(printable(several.table(loaded, numbers)))
    if gap:
        print(
            f"\nloss over {gap['steps']:,} common steps: {gap['mean']:.3g} apart on average, "
            f"{gap['largest']:.3g} at step {gap['at_step']:,}"
        )
    if settings:
        print(printable(f"\n{several.settings_table(loaded, settings)}"))
    for path in drawn:
        print(f"\nwrote {path}")
    note_all(unwritten)


def _compared(
    loaded: list[report.RecordedRun], output: Path | None
) -> tuple[list[Path], list[str]]:
    """Draw the comparison of the runs. Return two lists: the path of the picture, and the reason
    why the picture was not written. One of them is empty.

    Raise InputError if `output` was given and cannot be written.
    """
    drawn = (output or Path()) / "comparison.png"
    try:
        drawn.parent.mkdir(parents=True, exist_ok=True)
        several.picture(loaded, drawn)
    except OSError as error:
        if output is not None:
            raise InputError(f"--output {output}: {error.strerror}") from None
        return [], [f"no picture: {drawn}: {error.strerror}; --output DIR draws it elsewhere"]
    return [drawn], []
