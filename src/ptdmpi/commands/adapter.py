"""`ptdmpi adapter`: merge, split, export and import adapters. Neither MPI nor a GPU is needed."""

from pathlib import Path

import click

from ptdmpi.base.hub import downloaded, is_hub_name, require_repository, upload
from ptdmpi.base.say import note
from ptdmpi.base.words import file_size, short
from ptdmpi.comm import launch
from ptdmpi.terminal.options import EMA, PATH, PUSH
from ptdmpi.terminal.program import CommandGroup


@click.group(cls=CommandGroup)
def command() -> None:
    """Merge, split, export or import adapters, which `ptdmpi train` trains if its configuration has
    the section [adapt].

    BASE is a complete model, and ADAPTER contains adapters that were trained on this model. BASE
    and ADAPTER are run directories or checkpoints. These commands need neither MPI nor a GPU.
    """


@command.command()
@click.argument("base", type=PATH)
@click.argument("adapter", type=PATH)
@click.argument("target", type=PATH)
@EMA
def merge(base: Path, adapter: Path, target: Path, ema: bool) -> None:
    """Merge ADAPTER into BASE, and write the complete model to TARGET.

    The directory TARGET can be used with `ptdmpi train`, `evaluate`, `generate` and `convert
    to-hf`.
    """
    launch.prepare()
    from ptdmpi.convert import adapters
    from ptdmpi.inference.stored import kind_of

    size, remark = adapters.merge(base, adapter, target, kind_of(ema))
    print(f"{target}: a whole model, {file_size(size)}")
    if remark:
        print(f"note: {remark}")


@command.command()
@click.argument("base", type=PATH)
@click.argument("tuned", type=PATH)
@click.argument("target", type=PATH)
@click.option("--rank", type=click.IntRange(1), required=True, help="Adapter rank.")
def split(base: Path, tuned: Path, target: Path, rank: int) -> None:
    """Write the difference of the models TUNED and BASE as an adapter.

    The adapter, in the directory TARGET, is the best approximation of this difference with the
    given rank.
    """
    launch.prepare()
    from ptdmpi.convert import adapters

    left, others = adapters.split(base, tuned, target, rank)
    print(f"{target}: rank {rank}; largest relative error of a matrix's difference {left:.1e}")
    if others:
        print(f"note: {len(others)} other parameters differ and are left out: {others[0]}, ...")


@command.command("export")
@click.argument("adapter", type=PATH)
@click.argument("target", type=PATH)
@click.option("--base-name", default="", help="Name or path of the base model that `peft` loads.")
@PUSH
@EMA
def to_peft(adapter: Path, target: Path, *, base_name: str, push: str | None, ema: bool) -> None:
    """Write ADAPTER in the format of the package `peft`.

    The files are written to the directory TARGET. They contain the name of the base model: the
    value of --base-name, or by default its name on the Hugging Face hub, if the base model was
    converted from a model of the hub. If ADAPTER has a chat template, the template is written, too.
    """
    if push is not None:
        require_repository(push)
    launch.prepare()
    from ptdmpi.convert.peft.export import export
    from ptdmpi.inference.stored import kind_of

    count, remark = export(adapter, target, kind_of(ema), base_name)
    print(f"{target}: {short(count)} parameters")
    if remark:
        print(f"note: {remark}")
    if push is not None:
        note(f"uploaded {target} to {upload(target, push)}")


@command.command("import")
@click.argument("source")
@click.argument("base", type=PATH)
@click.argument("target", type=PATH)
def of_peft(source: str, base: Path, target: Path) -> None:
    """Convert an adapter of the package `peft`.

    SOURCE is the directory of the adapter, or the name of an adapter on the Hugging Face hub, which
    is downloaded. BASE is the model that the adapter was trained on. The result is written to the
    directory TARGET.
    """
    launch.prepare()
    from ptdmpi.convert.peft.read import ADAPTER_FILES, import_peft

    folder = Path(source)
    if is_hub_name(source):
        folder = downloaded(source, "model", ADAPTER_FILES)
    print(f"{target}: {short(import_peft(folder, base, target))} parameters")
