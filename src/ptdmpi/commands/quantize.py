"""`ptdmpi quantize`: quantize the weight matrices of a model's layers."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptdmpi.base.outside import mendable_paths
from ptdmpi.base.words import file_size, short
from ptdmpi.comm import launch
from ptdmpi.config import InputError
from ptdmpi.config.choices import CodesName
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.plan.layer.low_bit import LowBit
from ptdmpi.terminal.options import AS_JSON, EMA, PATH
from ptdmpi.terminal.program import Command

if TYPE_CHECKING:
    from ptdmpi.comm.world import World

INTEGER_CODES: dict[str, CodesName] = {"8": "int8", "4": "int4"}
FOUR_BIT_CODES: dict[str, CodesName] = {"nf4": "nf4", "asymmetric": "uint4"}
CALIBRATION_SAMPLES = 128  # Frantar et al. 2022, section 4


@click.command(cls=Command)
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option(
    "--bits",
    type=click.Choice(["8", "4"]),
    default="8",
    show_default=True,
    help="Bits of a weight.",
)
@click.option("--block", type=click.IntRange(2), default=64, show_default=True, help="Block size.")
@click.option("--nf4", is_flag=True, help="With --bits 4: the levels of NF4 instead of integers.")
@click.option("--asymmetric", is_flag=True, help="With --bits 4: store a minimum for each block.")
@click.option(
    "--method",
    type=click.Choice(["absmax", "gptq"]),
    default="absmax",
    show_default=True,
    help="absmax: round each weight; gptq: use calibration data.",
)
@click.option("--data", type=PATH, help="gptq: directory of token shards for calibration.")
@click.option(
    "--samples", type=click.IntRange(1), help=f"gptq: sequences [default: {CALIBRATION_SAMPLES}]."
)
@click.option(
    "--length", type=click.IntRange(2), help="gptq: tokens of a sequence [default: seq_length]."
)
@click.option(
    "--evaluate",
    multiple=True,
    type=PATH,
    help="Token shards on which the perplexity is measured before and after.",
)
@click.option("--precision", type=click.Choice(list(PRECISIONS)), help="Precision of --evaluate.")
@EMA
@AS_JSON
def command(source: Path, target: Path, as_json: bool, **options: Any) -> None:
    """Quantize the matrices of all layers of SOURCE, and write the model to the directory TARGET.

    SOURCE is a run directory, a checkpoint or a directory that `ptdmpi convert from-hf` has
    written. TARGET can be used with `generate`, `evaluate`, `convert to-hf` and the key
    `checkpoint.initial`. Rank 0 quantizes the model; all ranks measure the perplexities.

    ptdmpi quantize runs/demo runs/demo-int4 --bits 4 --method gptq --data runs/demo-data/train
    --evaluate runs/demo-data/valid
    """
    _check(options)
    options["samples"] = options["samples"] or CALIBRATION_SAMPLES
    launch.begin("quantize")
    # importing `World` initializes MPI, which must happen before torch starts its threads
    with launch.loading():
        from ptdmpi.comm.world import World, fail_together

    world = World()
    with fail_together(world), mendable_paths():
        form = LowBit(_codes(options), options["block"])
        result = work(source, target, form, world=world, options=options)
        if world.rank == 0:
            print(json.dumps(result) if as_json else _text(result))


def work(
    source: Path, target: Path, form: LowBit, *, world: "World", options: Mapping[str, Any]
) -> dict[str, Any]:
    """Quantize the model at `source` on rank 0, and write it to `target` in the format `form`.
    Return the results, including the perplexities before and after the quantization. All ranks must
    call this function, and all get the results.

    `options` are the options of the command. Raise InputError on all ranks for illegal options or
    inputs, before the computation if possible.
    """
    from ptdmpi.convert.quantize.calibration import CalibrationSamples
    from ptdmpi.convert.quantize.write import quantize
    from ptdmpi.evaluate import change
    from ptdmpi.inference.stored import kind_of, open_model

    calibrated = [options["data"]] if options["data"] else []
    world.on_root(partial(change.check_datasets, source, options["evaluate"], calibrated))
    kind = kind_of(options["ema"])

    def written() -> dict[str, Any]:
        samples = None
        if options["method"] == "gptq":
            length = options["length"] or open_model(source).config().model.seq_length
            samples = CalibrationSamples(options["data"], options["samples"], length)
        return asdict(quantize(source, target, form, samples=samples, kind=kind))

    results = {**world.on_root(written), "path": str(target), "perplexity": []}
    if options["evaluate"]:
        results["perplexity"] = change.perplexities(
            source, target, options["evaluate"], world, kind=kind, precision=options["precision"]
        )
    return results


def _check(options: dict[str, Any]) -> None:
    """Raise InputError if options contradict each other."""
    kinds = [f"--{name}" for name in FOUR_BIT_CODES if options[name]]
    if len(kinds) == 2:
        raise InputError(
            f"{' and '.join(kinds)} select two different formats; give only one of them"
        )
    if kinds and options["bits"] != "4":
        raise InputError(f"{kinds[0]} has 4 bits; legal: --bits 4")
    given = [name for name in ("data", "samples", "length") if options[name] is not None]
    if options["method"] == "gptq" and options["data"] is None:
        raise InputError("--method gptq needs --data DIR: token shards for calibration")
    if options["method"] == "absmax" and given:
        raise InputError(f"--{given[0]} belongs to --method gptq")
    if options["precision"] is not None and not options["evaluate"]:
        raise InputError("--precision is the type for perplexities; it belongs to --evaluate DIR")


def _codes(options: dict[str, Any]) -> CodesName:
    """Return the name of the quantized format that the options select."""
    for name, codes in FOUR_BIT_CODES.items():
        if options[name]:
            return codes
    return INTEGER_CODES[options["bits"]]


def _text(result: dict[str, Any]) -> str:
    """Return the result of a quantization as text."""
    lines = [
        f"{result['path']}: {result['matrices']} matrices, {short(result['elements'])} weights in "
        f"{result['codes']}, blocks of {result['block']}, {result['method']}: "
        f"{result['bits_per_element']:.2f} bits each; {file_size(result['bytes_before'])} in "
        f"float32 before, {file_size(result['bytes'])} now"
    ]
    for measured in result["perplexity"]:
        before = measured["before"]
        after = measured["after"]
        lines.append(
            f"{measured['dataset']}: perplexity {before:.4f} before, {after:.4f} after "
            f"({100 * (after / before - 1):+.2f} %), in {measured['precision']}"
        )
    return "\n".join(lines)
