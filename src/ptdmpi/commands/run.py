"""`ptdmpi run`: start a training run with its launcher, and restart the ranks if ranks are lost."""

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from ptdmpi.base.launched import launched_size
from ptdmpi.base.say import note
from ptdmpi.base.words import counted
from ptdmpi.config import InputError, LogConfig, RunConfig, load, resolve
from ptdmpi.config.files import parsed
from ptdmpi.terminal.options import PATH, SET, Number
from ptdmpi.terminal.program import Command


@click.command(
    cls=Command,
    exit_codes="Exit codes: 0 done, 2 bad input, 75 stopped on request after saving (the same "
    "command continues the run), else a failure.",
)
@click.argument("config", type=PATH)
@click.option(
    "-n", "ranks", type=click.IntRange(1), help="Number of ranks [default: the scheduler's]."
)
@click.option(
    "--hosts", default="", metavar="A:4,B:4", help="Hosts, with the number of ranks on each."
)
@click.option(
    "--launcher",
    default="",
    help="Launcher and its options [default: the launcher of this machine].",
)
@SET
@click.option(
    "--layout",
    type=click.Choice(["auto"]),
    help="Search for the best layout that fits into memory.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=5,
    show_default=True,
    help="Maximum number of restarts in a row without a new step.",
)
@click.option(
    "--grow-every",
    "grow_s",
    type=Number(),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How often a run checks whether lost nodes are back.",
)
def command(config: Path, ranks: int | None, settings: tuple[str, ...], **options: Any) -> None:
    """Train the model that the TOML file CONFIG describes, and restart after failures, for example

    ptdmpi run -n 4 CONFIG --set parallel.tensor=2

    The command starts mpirun (in a Slurm allocation: srun) with the settings that MPI needs. After
    Ctrl-C, the run completes the present step, saves a checkpoint and stops. If a rank dies, hangs
    or loses its node, the ranks are restarted within the same job. They continue from the newest
    saved state, on the remaining nodes.
    """
    from ptdmpi.sinks.notices import Notices, require_receivers
    from ptdmpi.supervise.environment import mpi_environment
    from ptdmpi.supervise.place import place_of
    from ptdmpi.supervise.supervisor import SupervisedJob, Supervisor

    if launched_size() > 1:
        raise InputError("ptdmpi run starts the launcher itself: call it without mpirun or srun")
    tree = load(config, settings)
    run, log = _run_and_log(tree)
    require_receivers(log)
    environment = mpi_environment()
    place = place_of(options["hosts"], environment, options["launcher"])
    wanted = ranks or place.ranks
    if not wanted:
        raise InputError(
            "the number of ranks is unknown; legal: -n RANKS, or a job of Slurm, PBS or LSF"
        )
    place = place.filled(wanted)
    if options["layout"] is None:
        _require_layout(tree, wanted)
    if run.on_failure == "shrink" and place.launcher == "mpirun":
        place = replace(place, options=(*place.options, "--with-ft", "ulfm"))
    job = SupervisedJob(
        config=str(config),
        settings=settings,
        searched=options["layout"] == "auto",
        tree=tree,
        run=run,
        ranks=wanted,
        restarts=options["restarts"],
        grow_s=options["grow_s"],
    )
    note(f"ptdmpi run: starting {counted(wanted, 'rank')} by {place.launcher}")
    messages = Notices(log, run, partial(print, file=sys.stderr, flush=True))
    code = Supervisor(job, place, environment, tell=messages.send).run()
    messages.close()
    sys.exit(code)


def _require_layout(tree: dict[str, Any], ranks: int) -> None:
    """Raise InputError if the model cannot be trained on `ranks` ranks. This check runs before the
    launcher is started. The message lists all mistakes in the configuration, as `ptdmpi train`
    does."""
    try:
        resolve(tree, ranks)
    except InputError:
        from ptdmpi.train.checks import checked  # imports torch

        checked(tree, ranks)


def _run_and_log(tree: dict[str, Any]) -> tuple[RunConfig, LogConfig]:
    """Return the sections [run] and [log] of a configuration. If they have mistakes, raise
    InputError with the same lines as `ptdmpi train`."""
    sections, mistakes, _ = parsed(tree)
    mistakes = [line for line in mistakes if re.match(r"(run|log)\b", line)]
    if mistakes or sections.run is None or sections.log is None:
        raise InputError("\n".join(mistakes))
    return sections.run, sections.log
