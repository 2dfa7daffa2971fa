"""`ptdmpi convert`: Hugging Face models, both ways; without MPI or a GPU."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from ptdmpi.convert.check import CheckFailed
from ptdmpi.convert.folder import Converted
from ptdmpi.convert.from_hf import from_hf
from ptdmpi.convert.to_hf import DTYPES, to_hf

PATH = click.Path(path_type=Path)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")


@click.group(short_help="Models of Hugging Face, both ways.")
def command() -> None:
    """Convert models from and to Hugging Face (GPT-2, LLaMA, BERT), without MPI or a GPU.

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
    try:
        _print(from_hf(source, target), as_json)
    except CheckFailed as error:
        _fail(error)


@command.command("to-hf")
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option("--like", type=PATH, help="A directory of from-hf: its files, names and types.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="Another type for all weights.")
@AS_JSON
def to_hugging_face(
    source: Path, target: Path, like: Path | None, dtype: str | None, as_json: bool
) -> None:
    """Convert SOURCE, a run directory, a checkpoint or what from-hf made, into the model directory
    TARGET.

    Of a model that came from Hugging Face, the names, files and types are those of before.
    """
    try:
        _print(to_hf(source, target, like, dtype), as_json)
    except CheckFailed as error:
        _fail(error)


def _print(done: Converted, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**asdict(done), "path": str(done.path)}))
        return
    print(
        f"{done.path}: {done.family}, {done.parameters / 1e6:,.1f}M parameters, vocabulary "
        f"{done.vocab_size}, {done.bytes / 1e6:,.1f} MB in {done.files} file"
        f"{'s' * (done.files > 1)}; logits of both sides agree to {done.difference:.1e}"
    )
    if done.note:
        print(f"note: {done.note}")


def _fail(error: CheckFailed) -> None:
    print(f"ptdmpi: error: {error}", file=sys.stderr)
    raise SystemExit(1) from None
