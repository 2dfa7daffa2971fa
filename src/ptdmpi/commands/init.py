"""`ptdmpi init`: write a first configuration, which can be used without changes."""

from pathlib import Path
from typing import Any

import click

from ptdmpi.base.disk import replacing
from ptdmpi.config import InputError
from ptdmpi.preview.wish import SMALL, Wish
from ptdmpi.terminal.options import PATH
from ptdmpi.terminal.program import Command


@click.command(cls=Command)
@click.argument("file", type=PATH)
@click.option("--data", required=True, type=PATH, help="Directory of token shards.")
@click.option("--valid", type=PATH, help="Token shards for validation.")
@click.option("--model", "--preset", help=f"A preset, or sizes. [default: {SMALL}]")
@click.option(
    "--adapt",
    type=PATH,
    metavar="BASE",
    help="Train LoRA adapters of this model (a run, or the result of convert from-hf).",
)
@click.option(
    "--ranks", type=click.IntRange(1), default=1, show_default=True, help="Ranks of the run."
)
@click.option(
    "--cluster", help="Use the best layout on this cluster (ptdmpi probe writes a cluster file)."
)
@click.option(
    "--steps", type=click.IntRange(1), help="Default: one epoch, but at most 10,000 steps."
)
@click.option("--name", help="Name of the run; default: the name of FILE.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def command(file: Path, ranks: int, force: bool, **wishes: Any) -> None:
    """Write a configuration to FILE for ptdmpi train, for example

    ptdmpi init first.toml --preset gpt3-125m --data data --ranks 8

    ptdmpi init lora.toml --adapt base --data conversations --ranks 2

    The directory of --data contains token shards, or two directories `train` and `valid` with token
    shards. Without --cluster, all ranks are assumed to run on this host, and the layout divides the
    model among as few ranks as the memory allows.
    """
    if file.exists() and not force:
        raise InputError(f"{file} exists already; give another name, or --force")
    # imported only here, because the module imports torch, which the help does not need
    from ptdmpi.preview.draft import draft

    memory_bytes, on_gpu = _machine(ranks)
    text = draft(Wish(file=file, ranks=ranks, memory_bytes=memory_bytes, on_gpu=on_gpu, **wishes))
    try:
        with replacing(file) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    click.echo(
        f"wrote {file}; next: mpirun -n {ranks} ptdmpi train {file} --dry-run, or without MPI "
        f"ptdmpi plan {file} --ranks {ranks}"
    )


def _machine(ranks: int) -> tuple[int, bool]:
    """Return two values: the number of bytes that each of `ranks` ranks may use on this host or its
    GPUs, and True if the host has GPUs."""
    import torch

    from ptdmpi.train.capacity import expected_sharing, rank_memory_bytes

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    return rank_memory_bytes(device, expected_sharing(device, ranks)), on_gpu
