"""`ptdmpi train`: started by mpirun or srun, once for each rank."""

from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptdmpi.base.words import counted
from ptdmpi.comm import launch
from ptdmpi.config import InputError, load
from ptdmpi.terminal.program import Command
from ptdmpi.terminal.say import note
from ptdmpi.watch.requests import StopRequest

if TYPE_CHECKING:
    from ptdmpi.comm.world import World
    from ptdmpi.config import Config


@click.command(
    cls=Command,
    short_help="Train a model; start it by mpirun or srun.",
    exit_codes="Exit codes: 0 done, 2 bad input, 75 stopped on request after saving (the same "
    "command goes on), else a failure.",
)
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Any key.")
@click.option("--layout", type=click.Choice(["auto"]), help="Search the best layout that fits.")
@click.option("--dry-run", is_flag=True, help="Check and show everything, and write nothing.")
@click.option("--ranks", type=click.IntRange(1), help="For --dry-run without mpirun: how many.")
@click.option("--json", "as_json", is_flag=True, help="Of --dry-run: print JSON, for programs.")
def command(
    config: Path, overrides: tuple[str, ...], layout: str | None, dry_run: bool, **dry: Any
) -> None:
    """Train the model that the TOML file CONFIG describes, for example

    mpirun -n 4 ptdmpi train CONFIG --set parallel.tensor=2

    With --layout auto the sizes of the axes, the schedule, the microbatch and recomputation are
    those that ptdmpi plan finds best on run.cluster, or on this machine, which is then measured
    first.

    With --dry-run, under mpirun or without it, nothing is trained and nothing written: data are
    opened, sizes and memory checked, time and total told, and the first batch shown as text. With
    --layout auto it searches, too, on run.cluster: a machine is measured by the run alone.
    """
    if dry_run:
        note("ptdmpi train --dry-run: checking configuration, data and memory")
        launch.prepare()
        from ptdmpi.preview.dry_run import show

        if auto := layout == "auto":
            from ptdmpi.plan.search.choose import require_free

            require_free(overrides)
        show(load(config, overrides), dry["ranks"], as_json=dry["as_json"], auto=auto)
        return
    if dry["ranks"] or dry["as_json"]:
        raise InputError("--ranks and --json belong to --dry-run")
    launch.begin("train")
    # from here on, so that a signal during the start-up is not lost
    with StopRequest() as signals:
        # MPI is initialised by this import: before torch starts its threads
        with launch.loading():
            from ptdmpi.comm.world import World, fail_together

        world = World()
        with fail_together(world):
            with launch.loading():
                from ptdmpi.train import recover

            note("ptdmpi train: checking configuration and data")
            tree = world.on_root(lambda: load(config, overrides))
            if layout == "auto":
                tree = _laid_out(tree, overrides, world)
            recover.train(tree, world, signals)


def _laid_out(tree: dict[str, Any], overrides: Sequence[str], world: "World") -> dict[str, Any]:
    """The configuration with the layout that the run has, or the best one."""
    from ptdmpi.plan.search import choose
    from ptdmpi.train.checks import checked_data, with_form

    world.on_root(lambda: choose.require_free(overrides))
    tree = world.on_root(lambda: dict(with_form(tree)))
    found = world.on_root(lambda: choose.settled(tree, world.size, checked_data))
    if found is None:
        cluster = _probed(world.on_root(lambda: choose.bare(tree)), world)
        measured = choose.applied(tree, {"run": {"cluster": cluster}})
        found = world.on_root(lambda: choose.settled(measured, world.size, checked_data))
    assert found is not None  # a cluster is named now
    laid_out, words = found
    if world.rank == 0:
        print(words, flush=True)
    return laid_out


def _probed(config: "Config", world: "World") -> str:
    """Measure this machine into the run directory; returns the file's path."""
    import torch

    from ptdmpi.commands.probe import save
    from ptdmpi.inference.model import device_of
    from ptdmpi.probe.machine import probe
    from ptdmpi.train.capacity import forget_peak

    path = Path(world.on_root(lambda: str(_unused(Path(config.run.dir)))))
    if world.rank == 0:
        print("layout auto: no run.cluster, so this machine is measured first", flush=True)
    torch.set_num_threads(config.run.threads)
    tree, _ = probe(world, config.precision.compute, device_of(world))
    forget_peak()  # of the measurement, which is not what the run takes
    head = f"# Measured by `ptdmpi train --layout auto` on {counted(world.size, 'rank')}.\n"
    world.on_root(lambda: save(path, tree, head))
    return str(path)


def _unused(folder: Path) -> Path:
    """A file in `folder`, which is made: cluster.toml, or where there is such a file, of another
    machine or number of ranks, with the next number in it: what was predicted there is read again
    by `ptdmpi report`. Raises InputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run.dir = {folder}: {error.strerror}") from None
    path = folder / "cluster.toml"
    names = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(one for one in chain([path], names) if not one.exists())
