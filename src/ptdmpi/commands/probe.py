"""`ptdmpi probe`: measure the machine, and write a cluster file for `ptdmpi plan --cluster
FILE`."""

import json
import os
from pathlib import Path

import click

from ptdmpi.base.heap import keep_freed
from ptdmpi.base.words import counted
from ptdmpi.comm import launch
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.config.section import MOST_THREADS
from ptdmpi.terminal.options import AS_JSON, PATH
from ptdmpi.terminal.program import Command


@click.command("probe", cls=Command)
@click.option("--output", type=PATH, required=True, help="The .toml file to write.")
@click.option(
    "--threads",
    type=click.IntRange(1, MOST_THREADS),
    default=1,
    show_default=True,
    help="Threads per rank.",
)
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    default="fp32",
    show_default=True,
    help="Type of weights and activations.",
)
@AS_JSON
def command(output: Path, threads: int, precision: str, as_json: bool) -> None:
    """Measure kernels, messages and layers, check their results, and write a cluster file:

    mpirun -n 2 ptdmpi probe --output here.toml

    Start as many ranks as the training will have: ranks share memory and network, so their number
    changes the results.
    """
    launch.begin("probe")
    # importing `World` initializes MPI, which must happen before torch starts its threads
    with launch.loading():
        from ptdmpi.comm.world import World, fail_together

    world = World()
    with fail_together(world):
        import torch

        from ptdmpi.probe.cluster_file import require_writable, save
        from ptdmpi.probe.machine import probe

        world.on_root(lambda: require_writable(output))
        torch.set_num_threads(threads)
        keep_freed(os.environ)
        tree, measured = probe(world, precision, world.device())
        if world.rank == 0:
            ranks = f"{counted(world.size, 'rank')}, {counted(threads, 'thread')} each"
            save(output, tree, f"# Measured by `ptdmpi probe` on {ranks}.\n")
            if as_json:
                click.echo(json.dumps({"cluster": tree, "file": str(output)}))
                return
            width = max(len(name) for name, _ in measured)
            for name, value in measured:
                click.echo(f"{name:<{width}}  {value}")
            click.echo(f"wrote {output}")
