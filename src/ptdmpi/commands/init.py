"""`ptdmpi init`: a first configuration, which trains as it stands."""

from pathlib import Path

import click

from ptdmpi.base.disk import replacing
from ptdmpi.config import InputError
from ptdmpi.preview.draft import SMALL, Wish, draft
from ptdmpi.terminal.program import Command


@click.command(cls=Command, short_help="Write a commented configuration that trains.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--data", required=True, type=click.Path(path_type=Path), help="Token shards.")
@click.option("--valid", type=click.Path(path_type=Path), help="Shards to validate on.")
@click.option("--model", "--preset", default=SMALL, show_default=True, help="A preset, or sizes.")
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True)
@click.option("--cluster", help="Take the best layout on this one (ptdmpi probe measures one).")
@click.option("--steps", type=click.IntRange(1), help="Default: one epoch, at most 10,000.")
@click.option("--name", help="Of the run; default: as FILE is called.")
@click.option("--force", is_flag=True, help="Write over a FILE that is there.")
def command(file: Path, data: Path, ranks: int, force: bool, **options: str | None) -> None:
    """Write a configuration to FILE for ptdmpi train, for example

    ptdmpi init first.toml --preset gpt3-125m --data data --ranks 8

    DATA holds shards, or the directories train and valid. Without --cluster the ranks share this
    host, and the layout is the one with the fewest ranks to a model that its memory allows.
    """
    if file.exists() and not force:
        raise InputError(f"{file} exists already; give another name, or --force")
    memory_bytes, on_gpu = _machine(ranks)
    valid = options["valid"]
    text = draft(
        Wish(
            file=file,
            model=str(options["model"]),
            data=data,
            ranks=ranks,
            memory_bytes=memory_bytes,
            on_gpu=on_gpu,
            valid=None if valid is None else Path(valid),
            cluster=options["cluster"],
            name=options["name"],
            steps=None if options["steps"] is None else int(options["steps"]),
        )
    )
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
    """What a rank may use of this host or its GPUs, and whether there are any."""
    import torch

    from ptdmpi.train.capacity import expected_sharing, rank_memory_bytes

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    return rank_memory_bytes(device, expected_sharing(device, ranks)), on_gpu
