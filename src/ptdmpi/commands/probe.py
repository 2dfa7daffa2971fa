"""`ptdmpi probe`: measures the machine under mpirun or srun, for `ptdmpi plan --cluster FILE`."""

import json
import os
from pathlib import Path
from typing import Any

import click

from ptdmpi.base.disk import write_whole
from ptdmpi.base.heap import keep_freed
from ptdmpi.base.words import counted
from ptdmpi.comm import launch
from ptdmpi.config import InputError
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.terminal.program import Command


@click.command("probe", cls=Command, short_help="Measure the machine; start it by mpirun or srun.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="A .toml file.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Per rank.")
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    default="fp32",
    show_default=True,
    help="Type of weights and activations.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def command(output: Path, threads: int, precision: str, as_json: bool) -> None:
    """Measure kernels, messages and layers, check their results, and write a cluster file:

    mpirun -n 2 ptdmpi probe --output here.toml

    Start as many ranks as a training would have: they share memory and network.
    """
    launch.begin("probe")
    # MPI is initialised by this import: before torch starts its threads
    with launch.loading():
        from ptdmpi.comm.world import World, fail_together

    world = World()
    with fail_together(world):
        import torch

        from ptdmpi.inference.model import device_of
        from ptdmpi.probe.machine import probe

        world.on_root(lambda: _check(output))
        torch.set_num_threads(threads)
        keep_freed(os.environ)
        tree, found = probe(world, precision, device_of(world))
        if world.rank == 0:
            ranks = f"{counted(world.size, 'rank')}, {counted(threads, 'thread')} each"
            head = f"# Measured by `ptdmpi probe` on {ranks}.\n"
            save(output, tree, head)
            if as_json:
                click.echo(json.dumps({"cluster": tree, "file": str(output)}))
                return
            width = max(len(name) for name, _ in found)
            for name, value in found:
                click.echo(f"{name:<{width}}  {value}")
            click.echo(f"wrote {output}")


def save(path: Path, tree: dict[str, Any], head: str) -> None:
    """Write a cluster file as a whole or not at all."""
    import tomlkit

    try:
        write_whole(path, head + tomlkit.dumps(tree))
    except OSError as error:
        raise InputError(f"--output {path}: {error.strerror}") from None


def _check(output: Path) -> None:
    if output.suffix != ".toml" or not output.parent.is_dir() or output.is_dir():
        raise InputError(f"--output {output}: must be a .toml file in a directory that exists")
    if not os.access(output.parent, os.W_OK):
        raise InputError(f"--output {output}: {output.parent} cannot be written to")
