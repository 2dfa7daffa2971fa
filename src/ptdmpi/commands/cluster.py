"""`ptdmpi cluster`: cluster files, which describe a machine to the planner."""

from pathlib import Path

import click

from ptdmpi.base.disk import write_whole
from ptdmpi.config import InputError
from ptdmpi.plan.machine.cluster import load_cluster, unknown_cluster
from ptdmpi.plan.machine.names import legal_clusters, preset_file
from ptdmpi.terminal.options import PATH
from ptdmpi.terminal.program import Command, CommandGroup


@click.group(cls=CommandGroup)
def command() -> None:
    """Write cluster files for ptdmpi plan, ptdmpi ask and run.cluster."""


@command.command(cls=Command)
@click.argument("file", type=PATH, default="cluster.toml")
@click.option("--from", "source", required=True, help=f"The cluster: {legal_clusters()}.")
def new(file: Path, source: str) -> None:
    """Copy a predefined cluster to FILE, which you can then edit. FILE is cluster.toml by default.
    An example:

    ptdmpi cluster new mine.toml --from dgx-h100

    Every number has its unit in its name, and its source in a comment. To get a cluster file with
    measured numbers instead, use ptdmpi probe.
    """
    preset = preset_file(source)
    if preset is None:
        raise InputError(unknown_cluster(source))
    if file.suffix != ".toml":
        raise InputError(f"{file}: the name of a cluster file must end in .toml")
    if file.exists():
        raise InputError(f"{file} exists already; give another name")
    name = load_cluster(source).name
    text = preset.read_text(encoding="utf-8")
    renamed = text.replace(f'\nname = "{name}"\n', f'\nname = "{file.stem}"\n', 1)
    head = f"# A copy of {name}: adapt the numbers. ptdmpi plan --cluster {file} uses them.\n"
    try:
        write_whole(file, head + renamed)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    click.echo(f"wrote {file}; next: edit it, then ptdmpi plan --cluster {file} ...")
