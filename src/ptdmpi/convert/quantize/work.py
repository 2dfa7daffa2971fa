"""All of `ptdmpi quantize`: writing by one rank, perplexities by all."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.convert.quantize.calibration import CalibrationSamples
from ptdmpi.convert.quantize.write import quantize
from ptdmpi.data.shards import Dataset
from ptdmpi.evaluate.perplexity import perplexity
from ptdmpi.evaluate.run import check_dataset
from ptdmpi.inference.model import open_inference
from ptdmpi.inference.stored import kind_of, open_model
from ptdmpi.model.state import WEIGHTS
from ptdmpi.plan.shape.low_bit import LowBit

Options = Mapping[str, Any]


def work(source: Path, target: Path, form: LowBit, world: World, **options: Any) -> dict[str, Any]:
    """`options` are those of `ptdmpi quantize`; every rank calls it and gets the results. Raises
    InputError on every rank, before anything is computed where that is possible."""
    world.on_root(partial(_check_datasets, source, options))
    kind = kind_of(options["ema"])
    found = world.on_root(
        lambda: asdict(quantize(source, target, form, _samples(source, options), kind))
    )
    found = {**found, "path": str(target), "perplexity": []}
    if options["evaluate"]:
        kinds = ((source, kind), (target, WEIGHTS))
        before, after = (_perplexities(*one, world, options) for one in kinds)
        for one, other in zip(before, after, strict=True):
            found["perplexity"].append({**one, "after": other["before"]})
    return found


def _check_datasets(source: Path, options: Options) -> None:
    stored = open_model(source)
    if options["evaluate"] and stored.config().model.masked:
        raise InputError(
            f"--evaluate: {source} sees both sides of a token, and has no perplexity; legal: "
            "without it"
        )
    if options["evaluate"] and stored.tree["model"].get("output_head") == "classes":
        raise InputError(
            f"--evaluate: {source} has a head for a task, and gives no tokens; legal: without it, "
            "and then `ptdmpi evaluate TARGET --tasks FILE`"
        )
    for path in (*options["evaluate"], *filter(None, [options["data"]])):
        check_dataset(path, stored)


def _samples(source: Path, options: Options) -> CalibrationSamples | None:
    if options["method"] != "gptq":
        return None
    length = options["length"] or open_model(source).config().model.seq_length
    return CalibrationSamples(options["data"], options["samples"], length)


def _perplexities(path: Path, kind: str, world: World, options: Options) -> list[dict[str, Any]]:
    """`before` is what this model has."""
    model, _ = open_inference(path, world, None, options["precision"], kind=kind)
    asked = [perplexity(model, Dataset(data)) for data in options["evaluate"]]
    precision = model.config.precision.compute
    return [
        {
            "dataset": one["dataset"],
            "tokens": one["tokens"],
            "precision": precision,
            "before": one["perplexity"],
        }
        for one in asked
    ]
