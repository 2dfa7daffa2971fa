"""`ptdmpi train`: started by mpirun or srun, once for each rank."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptdmpi.comm import launch
from ptdmpi.config import load
from ptdmpi.terminal.program import Command
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
def command(config: Path, overrides: tuple[str, ...], layout: str | None) -> None:
    """Train the model that the TOML file CONFIG describes, for example

    mpirun -n 4 ptdmpi train CONFIG --set parallel.tensor=2

    With --layout auto the sizes of the axes, the schedule, the microbatch and recomputation are
    those that ptdmpi plan finds best on run.cluster, or on this machine, which is then measured
    first.
    """
    launch.prepare()
    # from here on, so that a signal during the start-up is not lost
    with StopRequest() as signals:
        # MPI is initialised by this import: before torch starts its threads
        from ptdmpi.comm.world import World, fail_together

        world = World()
        with fail_together(world):
            from ptdmpi.train import recover

            tree = world.on_root(lambda: load(config, overrides))
            if layout == "auto":
                tree = _laid_out(tree, world)
            recover.train(tree, world, signals)


def _laid_out(tree: dict[str, Any], world: "World") -> dict[str, Any]:
    """The configuration with the layout that the run has, or the best one."""
    from ptdmpi.plan.search import choose
    from ptdmpi.train.loop import checked_data

    ranks = world.on_root(lambda: choose.working_ranks(tree, world.size))
    config = world.on_root(lambda: choose.bare(tree))
    chosen = world.on_root(lambda: choose.begun(config, world.size))
    if chosen is not None:
        if world.rank == 0:
            print(f"layout auto: as {config.run.dir} has it", flush=True)
        return choose.applied(tree, chosen)
    vocab_size = world.on_root(lambda: checked_data(config))
    if not config.run.cluster:
        tree = choose.applied(tree, {"run": {"cluster": _probed(config, world)}})

    def best() -> tuple[dict[str, Any], str]:
        from ptdmpi.plan.machine.cluster import load_cluster

        cluster = load_cluster(tree["run"]["cluster"])
        prices, pricer = choose.choose(config, vocab_size, cluster, ranks)
        return prices[0].layout.sections(), choose.words(prices, pricer)

    chosen, words = world.on_root(best)
    if world.rank == 0:
        print(words, flush=True)
    return choose.applied(tree, chosen)


def _probed(config: "Config", world: "World") -> str:
    """Measure this machine into the run directory; returns the file's path."""
    import torch

    from ptdmpi.commands.probe import save
    from ptdmpi.inference.model import device_of
    from ptdmpi.probe.machine import probe

    path = Path(config.run.dir) / "cluster.toml"
    if world.rank == 0:
        print("layout auto: no run.cluster, so this machine is measured first", flush=True)
    torch.set_num_threads(config.run.threads)
    tree, _ = probe(world, config.precision.compute, device_of(world))
    head = f"# Measured by `ptdmpi train --layout auto` on {world.size} ranks.\n"
    world.on_root(lambda: save(path, tree, head))
    return str(path)
