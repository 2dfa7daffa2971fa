"""`ptdmpi quantize`: a model whose layers have their matrices in few bits."""

import json
from pathlib import Path
from typing import Any

import click

from ptdmpi.base.words import file_size, short
from ptdmpi.comm import launch
from ptdmpi.commands.generate import EMA
from ptdmpi.config import InputError
from ptdmpi.config.legality import CodesName
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.plan.shape.low_bit import LowBit
from ptdmpi.terminal.program import Command, mendable_paths

PATH = click.Path(path_type=Path)
WHOLE: dict[str, CodesName] = {"8": "int8", "4": "int4"}
FOUR: dict[str, CodesName] = {"nf4": "nf4", "asymmetric": "uint4"}
SAMPLES = 128  # Frantar et al. 2022, section 4


@click.command(cls=Command, short_help="Weights in 8 or 4 bits, with or without calibration.")
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option("--bits", type=click.Choice(["8", "4"]), default="8", show_default=True)
@click.option("--block", type=click.IntRange(2), default=64, show_default=True, help="Of a row.")
@click.option("--nf4", is_flag=True, help="4 bits: the levels of NF4, not whole numbers.")
@click.option("--asymmetric", is_flag=True, help="4 bits: each block has a least value, too.")
@click.option("--method", type=click.Choice(["absmax", "gptq"]), default="absmax")
@click.option("--data", type=PATH, help="gptq: directory of token shards for calibration.")
@click.option("--samples", type=click.IntRange(1), help=f"gptq: sequences [default: {SAMPLES}].")
@click.option("--length", type=click.IntRange(2), help="gptq: their tokens [default: seq_length].")
@click.option("--evaluate", multiple=True, type=PATH, help="Token shards: perplexity, both sides.")
@click.option("--precision", type=click.Choice(list(PRECISIONS)), help="Of that.")
@EMA
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def command(source: Path, target: Path, as_json: bool, **options: Any) -> None:
    """Put the matrices of all layers of SOURCE, a run directory, a checkpoint or what `ptdmpi
    convert from-hf` made, into few bits: the directory TARGET, which `generate`, `evaluate`,
    `convert to-hf` and `checkpoint.initial` take. Rank 0 does it; perplexities are measured by all.

    ptdmpi quantize runs/demo runs/demo-int4 --bits 4 --method gptq --data runs/demo-data/train
    --evaluate runs/demo-data/valid
    """
    _check(options)
    launch.begin("quantize")
    # MPI is initialised by this import: before torch starts its threads
    with launch.loading():
        from ptdmpi.comm.world import World, fail_together

    world = World()
    with fail_together(world), mendable_paths():
        from ptdmpi.convert.quantize.work import work

        form = LowBit(_codes(options), options["block"])
        found = work(source, target, form, world, **options)
        if world.rank == 0:
            print(json.dumps(found) if as_json else _told(found))


def _check(options: dict[str, Any]) -> None:
    """Raises InputError for options that do not go together."""
    kinds = [f"--{name}" for name in FOUR if options[name]]
    if len(kinds) == 2:
        raise InputError(f"{' and '.join(kinds)} are two kinds of codes; legal: one of them")
    if kinds and options["bits"] != "4":
        raise InputError(f"{kinds[0]} has 4 bits; legal: --bits 4")
    given = [name for name in ("data", "samples", "length") if options[name] is not None]
    if options["method"] == "gptq" and options["data"] is None:
        raise InputError("--method gptq needs --data DIR: token shards for calibration")
    if options["method"] == "absmax" and given:
        raise InputError(f"--{given[0]} belongs to --method gptq")
    if options["precision"] is not None and not options["evaluate"]:
        raise InputError("--precision is that of perplexities; it belongs to --evaluate DIR")
    options["samples"] = options["samples"] or SAMPLES


def _codes(options: dict[str, Any]) -> CodesName:
    asked = [codes for name, codes in FOUR.items() if options[name]]
    return asked[0] if asked else WHOLE[options["bits"]]


def _told(found: dict[str, Any]) -> str:
    lines = [
        f"{found['path']}: {found['matrices']} matrices, {short(found['elements'])} weights in "
        f"{found['codes']}, blocks of {found['block']}, {found['method']}: "
        f"{found['bits_per_element']:.2f} bits each; {file_size(found['bytes_before'])} in float32 "
        f"before, {file_size(found['bytes'])} now"
    ]
    for one in found["perplexity"]:
        lines.append(
            f"{one['dataset']}: perplexity {one['before']:.4f} before, {one['after']:.4f} after "
            f"({100 * (one['after'] / one['before'] - 1):+.2f} %), in {one['precision']}"
        )
    return "\n".join(lines)
