"""`ptdmpi convert`: convert from and to models of Hugging Face. The command needs no MPI and no
GPU."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptdmpi.base.hub import downloaded, is_hub_name
from ptdmpi.base.words import counted, file_size, short
from ptdmpi.comm import launch
from ptdmpi.terminal.options import AS_JSON, EMA, PATH
from ptdmpi.terminal.program import CommandGroup

if TYPE_CHECKING:
    from ptdmpi.convert.folder import Converted

DTYPES = ("float32", "float16", "bfloat16")


@click.group(cls=CommandGroup)
def command() -> None:
    """Convert from and to Hugging Face: GPT-2, LLaMA, Mistral, Qwen, Gemma 2, BERT.

    No MPI or GPU is needed. Each conversion checks that both models give the same logits for fixed
    prompts. If they do not, it writes nothing and the exit code is 1.
    """


@command.command("from-hf")
@click.argument("source")
@click.argument("target", type=PATH)
@AS_JSON
def from_hugging_face(source: str, target: Path, as_json: bool) -> None:
    """Convert the model directory SOURCE (config.json, *.safetensors) into the directory TARGET.

    SOURCE may also be the name of a model on the Hugging Face hub, which is downloaded.

    `ptdmpi train`, `evaluate` and `generate` read TARGET.
    """
    launch.prepare()
    from ptdmpi.convert.from_hf import MODEL_FILES, from_hf

    folder = Path(source)
    name = ""
    if is_hub_name(source):
        name = source
        folder = downloaded(source, "model", MODEL_FILES)
    _print(lambda: from_hf(folder, target, name), as_json)


@command.command("to-hf")
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option("--like", type=PATH, help="Take files, names and types of this from-hf directory.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Type of all weights.")
@click.option(
    "--packed", is_flag=True, help="Keep quantized matrices quantized (compressed-tensors)."
)
@EMA
@AS_JSON
def to_hugging_face(
    source: Path,
    target: Path,
    *,
    like: Path | None,
    dtype: str | None,
    packed: bool,
    ema: bool,
    as_json: bool,
) -> None:
    """Convert SOURCE into the model directory TARGET.

    SOURCE is a run directory, a checkpoint or a directory of from-hf. A model that came from
    Hugging Face keeps its tensor names, files and data types.
    """
    launch.prepare()
    from ptdmpi.convert.to_hf import to_hf
    from ptdmpi.inference.stored import kind_of

    _print(
        lambda: to_hf(source, target, like, dtype=dtype, quantized=packed, kind=kind_of(ema)),
        as_json,
    )


def _print(convert: "Callable[[], Converted]", as_json: bool) -> None:
    """Convert and print the result. Exit with code 1 if both models give different logits."""
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
        f"{counted(done.files, 'file')}; logits of both models agree to {done.difference:.1e}"
    )
    if done.note:
        print(f"note: {done.note}")
