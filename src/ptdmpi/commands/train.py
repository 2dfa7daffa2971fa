"""`ptdmpi train`: started by mpirun or srun, once for each rank."""

from pathlib import Path

import click

from ptdmpi.comm import launch
from ptdmpi.config import load
from ptdmpi.train.watch import StopRequest


@click.command(short_help="Train a model; start it by mpirun or srun.")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Any key.")
def command(config: Path, overrides: tuple[str, ...]) -> None:
    """Train the model that the TOML file CONFIG describes, for example

    mpirun -n 4 ptdmpi train CONFIG --set parallel.tensor=2
    """
    launch.prepare()
    # from here on, so that a signal during the start-up is not lost
    with StopRequest() as signals:
        # MPI is initialised by this import: before torch starts its threads
        from ptdmpi.comm.world import World, fail_together

        world = World()
        with fail_together(world):
            from ptdmpi.train.loop import Loop

            tree = world.on_root(lambda: load(config, overrides))
            Loop(tree, world, signals).run()
