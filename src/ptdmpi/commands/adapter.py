"""`ptdmpi adapter`: adapters and whole models, and the format of `peft`; without MPI or a GPU."""

from pathlib import Path

import click

from ptdmpi.base.words import file_size, short
from ptdmpi.comm import launch
from ptdmpi.commands.generate import EMA
from ptdmpi.terminal.program import CommandGroup

PATH = click.Path(path_type=Path)


@click.group(cls=CommandGroup, short_help="Merge, split, export or import adapters.")
def command() -> None:
    """Merge, split, export or import what `ptdmpi train` with [adapt] has trained, without MPI or a
    GPU.

    BASE is a whole model and ADAPTER what was trained beside it: a run directory or a checkpoint.
    """


@command.command()
@click.argument("base", type=PATH)
@click.argument("adapter", type=PATH)
@click.argument("target", type=PATH)
@EMA
def merge(base: Path, adapter: Path, target: Path, ema: bool) -> None:
    """Write the whole model that BASE with ADAPTER is into the directory TARGET,

    which `ptdmpi train`, `evaluate`, `generate` and `convert to-hf` take.
    """
    launch.prepare()
    from ptdmpi.convert import adapters
    from ptdmpi.inference.stored import kind_of

    size, note = adapters.merge(base, adapter, target, kind_of(ema))
    print(f"{target}: a whole model, {file_size(size)}")
    if note:
        print(f"note: {note}")


@command.command()
@click.argument("base", type=PATH)
@click.argument("tuned", type=PATH)
@click.argument("target", type=PATH)
@click.option("--rank", type=click.IntRange(1), required=True, help="Of the adapter.")
def split(base: Path, tuned: Path, target: Path, rank: int) -> None:
    """Write what TUNED differs from BASE in as an adapter of a rank into the directory TARGET, as
    near as that rank can be."""
    launch.prepare()
    from ptdmpi.convert import adapters

    left, others = adapters.split(base, tuned, target, rank)
    print(f"{target}: rank {rank}; of no linear's difference more than {left:.1e} is left")
    if others:
        print(f"note: {len(others)} other parameters differ and are left out: {others[0]}, ...")


@command.command("export")
@click.argument("adapter", type=PATH)
@click.argument("target", type=PATH)
@EMA
def to_peft(adapter: Path, target: Path, ema: bool) -> None:
    """Write ADAPTER into the directory TARGET as the package `peft` reads it."""
    launch.prepare()
    from ptdmpi.convert.peft.export import export
    from ptdmpi.inference.stored import kind_of

    print(f"{target}: {short(export(adapter, target, kind_of(ema)))} parameters")


@command.command("import")
@click.argument("source", type=PATH)
@click.argument("base", type=PATH)
@click.argument("target", type=PATH)
def of_peft(source: Path, base: Path, target: Path) -> None:
    """Write the adapter that `peft` has saved in the directory SOURCE, beside the model BASE, into
    the directory TARGET."""
    launch.prepare()
    from ptdmpi.convert.peft.read import import_peft

    print(f"{target}: {short(import_peft(source, base, target))} parameters")
