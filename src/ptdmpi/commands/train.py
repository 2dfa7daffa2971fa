"""`ptdmpi train`: train a model. mpirun or srun starts this command once for each rank."""

from pathlib import Path
from typing import Any

import click

from ptdmpi.base import early
from ptdmpi.base.say import note
from ptdmpi.comm import launch, starting
from ptdmpi.config import InputError, load
from ptdmpi.terminal.options import PATH, SET
from ptdmpi.terminal.program import Command
from ptdmpi.watch.requests import StopRequest


@click.command(
    cls=Command,
    exit_codes="Exit codes: 0 done, 2 bad input, 75 stopped on request after saving (the same "
    "command continues the run), else a failure.",
)
@click.argument("config", type=PATH)
@SET
@click.option(
    "--layout",
    type=click.Choice(["auto"]),
    help="Search for the best layout that fits into memory.",
)
@click.option(
    "--dry-run", is_flag=True, help="Check and show the run without training; write nothing."
)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    help="With --dry-run and without mpirun: number of ranks to check for.",
)
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print JSON, for programs.")
def command(
    config: Path, settings: tuple[str, ...], layout: str | None, dry_run: bool, **dry: Any
) -> None:
    """Train the model that the TOML file CONFIG describes, for example

    mpirun -n 4 ptdmpi train CONFIG --set parallel.tensor=2

    With --layout auto, the command takes the best layout (sizes of the axes, schedule, microbatch,
    recomputation) that ptdmpi plan finds on the cluster of the key run.cluster. If run.cluster is
    not set, the command first measures this machine.

    With --dry-run, with or without mpirun, nothing is trained and nothing is written. A dry run
    opens the data, checks sizes and memory, predicts the time, and shows the first batch as text.
    It does not measure the machine, so with --layout auto it needs the key run.cluster.
    """
    if dry_run:
        # a signal may end the process from here on, because a dry run has nothing to save
        early.release()
        note("ptdmpi train --dry-run: checking configuration, data and memory")
        launch.prepare()
        from ptdmpi.preview.dry_run import show

        if layout == "auto":
            from ptdmpi.plan.search.choose import require_free

            require_free(settings)
        tree = load(config, settings)
        show(tree, dry["ranks"], as_json=dry["as_json"], auto=layout == "auto")
        return
    if dry["ranks"] or dry["as_json"]:
        raise InputError("--ranks and --json belong to --dry-run")
    launch.begin("train")
    # signals are recorded from here on, because a signal during the start-up must not be lost
    with StopRequest() as signals:
        # importing `World` initializes MPI, which must happen before torch starts its threads
        with launch.loading(), starting.watched():
            from ptdmpi.comm.world import World, fail_together

        world = World()
        with fail_together(world):
            with launch.loading():
                from ptdmpi.train.run import Launch, Run

            note("ptdmpi train: checking configuration and data")
            tree = world.on_root(lambda: load(config, settings))
            if layout == "auto":
                from ptdmpi.probe.layout_auto import with_best_layout

                tree = with_best_layout(tree, settings, world)
            Run(tree, launch=Launch(world, signals)).train()
