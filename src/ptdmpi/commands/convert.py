"""`ptdmpi convert`: convert models from and to the format of Hugging Face, and turn dense models
into mixtures of experts. Neither MPI nor a GPU is needed."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptdmpi.base.hub import converted_at, downloaded, is_hub_name, require_repository, upload
from ptdmpi.base.say import note
from ptdmpi.base.words import counted, file_size, short
from ptdmpi.comm import launch
from ptdmpi.config import InputError
from ptdmpi.terminal.options import AS_JSON, EMA, PATH, PUSH, FiniteRange
from ptdmpi.terminal.program import CommandGroup

if TYPE_CHECKING:
    from ptdmpi.convert.folder import Converted

DTYPES = ("float32", "float16", "bfloat16")


@click.group(cls=CommandGroup)
def command() -> None:
    """Convert models from and to the format of Hugging Face: GPT-2, LLaMA, Mistral, Qwen, Gemma 2,
    BERT. `upcycle` turns a dense model into a mixture of experts.

    Neither MPI nor a GPU is needed. Each conversion from or to Hugging Face checks that both models
    give the same logits for fixed prompts. If the logits differ, the command writes nothing, and
    the exit code is 1.
    """


@command.command("from-hf")
@click.argument("source")
@click.argument("target", type=PATH, required=False)
@AS_JSON
def from_hugging_face(source: str, target: Path | None, as_json: bool) -> None:
    """Convert the Hugging Face model SOURCE, and write it to TARGET.

    SOURCE is a directory with config.json and *.safetensors, or the name of a model on the Hugging
    Face hub, which is downloaded. Without TARGET, the converted model is stored in the user's
    cache, and all commands accept its name on the hub.

    The directory TARGET can be used with `ptdmpi train`, `evaluate` and `generate`.
    """
    launch.prepare()
    from ptdmpi.convert.from_hf import MODEL_FILES, from_hf

    folder = Path(source)
    name = ""
    if is_hub_name(source):
        name = source
        target = target or converted_at(name)
        folder = downloaded(source, "model", MODEL_FILES)
    elif not folder.is_dir():
        raise InputError(
            f"{source}: no such folder; legal: a folder with config.json and *.safetensors, or the "
            "name of a model on the Hugging Face hub, as org/name"
        )
    if target is None:
        raise InputError(
            f"TARGET is missing: {source} is a path, and only models of the Hugging Face hub are "
            "kept in the user's cache"
        )
    _print(partial(from_hf, folder, target, name), as_json)


@command.command("to-hf")
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option("--like", type=PATH, help="Use the files, names and types of this from-hf directory.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Type of all weights.")
@click.option(
    "--packed", is_flag=True, help="Keep quantized matrices quantized (compressed-tensors)."
)
@PUSH
@EMA
@AS_JSON
def to_hugging_face(
    source: Path, target: Path, *, like: Path | None, dtype: str | None, **options: Any
) -> None:
    """Convert SOURCE to a Hugging Face model in the directory TARGET.

    SOURCE is a run directory, a checkpoint or a directory that from-hf has written. A model that
    was converted from Hugging Face gets the same tensor names, files and data types again.
    """
    push: str | None = options["push"]
    if push is not None:
        require_repository(push)
    launch.prepare()
    from ptdmpi.convert.to_hf import to_hf
    from ptdmpi.inference.stored import kind_of

    convert = partial(to_hf, source, target, like, dtype=dtype, quantized=options["packed"])
    _print(lambda: convert(kind=kind_of(options["ema"])), options["as_json"])
    if push is not None:
        note(f"uploaded {target} to {upload(target, push)}")


@command.command("upcycle")
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option("--experts", type=click.IntRange(2), required=True, help="Experts per layer.")
@click.option(
    "--experts-per-token",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Experts per token.",
)
@click.option(
    "--dense-layers",
    type=click.IntRange(0),
    default=0,
    help="Number of first layers that stay dense.",
)
@click.option(
    "--moe-every", type=click.IntRange(1), default=1, help="Only every M-th layer gets experts."
)
@click.option(
    "--no-normalize", is_flag=True, help="Do not divide a token's expert weights by their sum."
)
@click.option(
    "--router-std", type=FiniteRange(0), help="Standard deviation of the routers' weights."
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, help="Seed of the routers.")
@EMA
@AS_JSON
def upcycle_to_experts(source: Path, target: Path, **options: Any) -> None:
    """Turn the dense model SOURCE into a mixture of experts.

    The result is written to the directory TARGET. Every expert begins as a copy of its layer's MLP,
    and the routers are random. To train the result, set `checkpoint.initial = "TARGET"`. SOURCE is
    a run directory, a checkpoint or a directory that from-hf has written.
    """
    launch.prepare()
    from ptdmpi.convert.upcycle.write import ROUTER_STD, Experts, upcycle
    from ptdmpi.inference.stored import kind_of

    std = options["router_std"]
    experts = Experts(
        count=options["experts"],
        chosen=options["experts_per_token"],
        dense_layers=options["dense_layers"],
        moe_every=options["moe_every"],
        normalizes=not options["no_normalize"],
        router_std=ROUTER_STD if std is None else std,
        seed=options["seed"],
    )
    done = upcycle(source, target, experts, kind_of(options["ema"]))
    if options["as_json"]:
        print(json.dumps({**asdict(done), "path": str(done.path)}))
        return
    print(
        f"{done.path}: {done.experts} experts, {done.experts_per_token} for each token, in "
        f"{counted(done.layers, 'layer')}; {short(done.parameters)} parameters, "
        f"{short(done.active_parameters)} for each token, {file_size(done.bytes)}"
    )


def _print(convert: "Callable[[], Converted]", as_json: bool) -> None:
    """Call `convert`, and print its result. Exit with code 1 if the two models give different
    logits."""
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
