"""The implementation of `ptdmpi quantize`: one rank writes the model, all ranks compute
perplexities."""

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
from ptdmpi.plan.layer.low_bit import LowBit

Options = Mapping[str, Any]


def work(source: Path, target: Path, form: LowBit, world: World, **options: Any) -> dict[str, Any]:
    """Quantize the model at `source`, and return the results, which include the perplexities before
    and after. All ranks call this and get the results.

    `options` are those of `ptdmpi quantize`. Raise InputError on all ranks for illegal options or
    inputs, if possible before anything is computed.
    """
    world.on_root(partial(_check_datasets, source, options))
    kind = kind_of(options["ema"])
    written = world.on_root(
        lambda: asdict(quantize(source, target, form, samples=_samples(source, options), kind=kind))
    )
    results = {**written, "path": str(target), "perplexity": []}
    if options["evaluate"]:
        before = _perplexities(source, kind, world, options)
        after = _perplexities(target, WEIGHTS, world, options)
        for row, other in zip(before, after, strict=True):
            results["perplexity"].append({**row, "after": other["before"]})
    return results


def _check_datasets(source: Path, options: Options) -> None:
    """Raise InputError if the model cannot be evaluated, or a dataset does not fit it."""
    stored = open_model(source)
    if options["evaluate"] and stored.config().model.masked:
        raise InputError(
            f"--evaluate: {source} is a masked language model, which has no perplexity; legal: "
            "without it"
        )
    if options["evaluate"] and stored.tree["model"].get("output_head") == "classes":
        raise InputError(
            f"--evaluate: {source} has a head for a task, and predicts no tokens; legal: without "
            "it, and then `ptdmpi evaluate TARGET --tasks FILE`"
        )
    for path in (*options["evaluate"], *filter(None, [options["data"]])):
        check_dataset(path, stored)


def _samples(source: Path, options: Options) -> CalibrationSamples | None:
    """Return the calibration samples that the options name; None for a method that needs none."""
    if options["method"] != "gptq":
        return None
    length = options["length"] or open_model(source).config().model.seq_length
    return CalibrationSamples(options["data"], options["samples"], length)


def _perplexities(path: Path, kind: str, world: World, options: Options) -> list[dict[str, Any]]:
    """Return a model's perplexity on each dataset of the options, under the key "before"."""
    model, _ = open_inference(path, world, None, options["precision"], kind=kind)
    rows = [perplexity(model, Dataset(data)) for data in options["evaluate"]]
    precision = model.config.precision.compute
    return [
        {
            "dataset": row["dataset"],
            "tokens": row["tokens"],
            "precision": precision,
            "before": row["perplexity"],
        }
        for row in rows
    ]
