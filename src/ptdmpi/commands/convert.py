"""`ptdmpi convert`: Hugging Face models, both ways; without MPI or a GPU."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptdmpi.base.words import counted, file_size, short
from ptdmpi.comm import launch
from ptdmpi.commands.generate import EMA
from ptdmpi.terminal.program import CommandGroup

if TYPE_CHECKING:
    from ptdmpi.convert.folder import Converted

PATH = click.Path(path_type=Path)
DTYPES = ("float32", "float16", "bfloat16")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")


@click.group(cls=CommandGroup, short_help="Models of Hugging Face, both ways.")
def command() -> None:
    """Convert models from and to Hugging Face (GPT-2, LLaMA, Mistral, Qwen, Gemma 2, BERT), without
    MPI or a GPU.

    Each conversion checks itself: both sides must give the same logits on fixed prompts. If they do
    not, nothing is written and the exit code is 1.
    """


@command.command("from-hf")
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@AS_JSON
def from_hugging_face(source: Path, target: Path, as_json: bool) -> None:
    """Convert the model directory SOURCE (config.json, *.safetensors) into the directory TARGET,

    which `ptdmpi train`, `evaluate` and `generate` take.
    """
    launch.prepare()
    from ptdmpi.convert.from_hf import from_hf

    _print(lambda: from_hf(source, target), as_json)


@command.command("to-hf")
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option("--like", type=PATH, help="A directory of from-hf: its files, names and types.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Another type for all weights.")
@click.option("--packed", is_flag=True, help="What is in few bits stays so: compressed-tensors.")
@EMA
@AS_JSON
def to_hugging_face(
    source: Path,
    target: Path,
    like: Path | None,
    dtype: str | None,
    packed: bool,
    ema: bool,
    as_json: bool,
) -> None:
    """Convert SOURCE, a run directory, a checkpoint or what from-hf made, into the model directory
    TARGET.

    Of a model that came from Hugging Face, the names, files and types are those of before.
    """
    launch.prepare()
    from ptdmpi.convert.to_hf import to_hf
    from ptdmpi.inference.stored import kind_of

    _print(lambda: to_hf(source, target, like, dtype, packed, kind_of(ema)), as_json)


def _print(convert: "Callable[[], Converted]", as_json: bool) -> None:
    from ptdmpi.convert.check import CheckFailed

    try:
        done = convert()
    except CheckFailed as error:
        print(f"ptdmpi: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if as_json:
        print(json.dumps({**asdict(done), "path": str(done.path)}))
        return
    print(
        f"{done.path}: {done.family}, {short(done.parameters)} parameters, vocabulary "
        f"{done.vocab_size}, {file_size(done.bytes)} in "
        f"{counted(done.files, 'file')}; logits of both sides agree to {done.difference:.1e}"
    )
    if done.note:
        print(f"note: {done.note}")
