"""The perplexity of a model before and after a change of its weights, such as quantization."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.data.shards import Dataset
from ptdmpi.evaluate.perplexity import perplexity
from ptdmpi.evaluate.run import check_dataset
from ptdmpi.inference.model import open_inference
from ptdmpi.inference.stored import kind_of, open_model


def check_datasets(path: Path, evaluated: Sequence[Path], others: Iterable[Path]) -> None:
    """Raise InputError if the perplexity of the model at `path` cannot be computed on the datasets
    `evaluated`, or if a dataset in `evaluated` or `others` was made with another tokenizer."""
    stored = open_model(path)
    if evaluated and stored.config().model.masked:
        raise InputError(
            f"--evaluate: {path} is a masked language model, which has no perplexity; legal: "
            "no --evaluate"
        )
    if evaluated and stored.tree["model"].get("output_head") == "classes":
        raise InputError(
            f"--evaluate: {path} has a head for a task, and predicts no tokens; legal: no "
            "--evaluate; run `ptdmpi evaluate TARGET --tasks FILE` afterwards"
        )
    for dataset in (*evaluated, *others):
        check_dataset(dataset, stored)


def perplexities(
    before: Path,
    after: Path,
    datasets: Sequence[Path],
    world: World,
    *,
    kind: str,
    precision: str | None,
) -> list[dict[str, Any]]:
    """Return one table for each dataset: the perplexity of the first model (`before`) and of the
    second model (`after`), the number of `tokens`, and the `precision` of the first model.

    All ranks call this function together and get the results. For the first model, `kind` selects
    the stored values: the trained weights, or the moving average of the weights. The second model
    has only one kind of weights, so `kind` does not apply to it.
    """
    first = _perplexities(before, datasets, world, kind=kind, precision=precision)
    second = _perplexities(after, datasets, world, kind=kind_of(average=False), precision=precision)
    return [
        {
            "dataset": row["dataset"],
            "tokens": row["tokens"],
            "precision": row["precision"],
            "before": row["perplexity"],
            "after": other["perplexity"],
        }
        for row, other in zip(first, second, strict=True)
    ]


def _perplexities(
    path: Path, datasets: Sequence[Path], world: World, *, kind: str, precision: str | None
) -> list[dict[str, Any]]:
    """Return the result of the function `perplexity` for each dataset, with the additional entry
    `precision`, the precision in which the model computes."""
    model, _ = open_inference(path, world, None, precision, kind=kind)
    computed_in = {"precision": model.config.precision.compute}
    return [perplexity(model, Dataset(data, verified=True)) | computed_in for data in datasets]
