"""The log-probabilities of a reference model, which are stored with pairs of answers (`ptdmpi-data
score`)."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ptdmpi.base.progress import progress
from ptdmpi.comm.world import World
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.data.batches import MicrobatchRows
from ptdmpi.data.documents import LabelWeights, Windows, with_documents, with_weights
from ptdmpi.data.references import write_shard, write_summary
from ptdmpi.data.shards import Dataset
from ptdmpi.evaluate.run import check_dataset
from ptdmpi.evaluate.scoring import rows_of
from ptdmpi.generate.sampling import NOT_FINITE
from ptdmpi.inference.model import InferenceModel, open_inference
from ptdmpi.inference.stored import StoredModel, kind_of
from ptdmpi.inference.tensors import as_tensors


def score(run: Path, paths: tuple[Path, ...], world: World, **options: Any) -> list[dict[str, Any]]:
    """Store the log-probabilities of the labels in datasets of answer pairs, and return a table of
    results for each dataset. Every rank calls this function.

    `options` are the options of the command. Raises InputError on every rank if the model or a
    dataset cannot be used, or if a log-probability is not finite.
    """
    model, stored = open_inference(
        run,
        world,
        options["layout"],
        options["precision"],
        adapter=options["adapter"],
        kind=kind_of(options["ema"]),
    )
    for path in paths:
        world.on_root(partial(_check, path, stored, model))
    name = f"{stored.checkpoint}, {model.config.precision.compute}"
    if options["adapter"] is not None:
        name += f", adapters {options['adapter']}"
    return [_score(model, Dataset(path, verified=True), world, name) for path in paths]


def _check(path: Path, stored: StoredModel, model: InferenceModel) -> None:
    """Raise InputError unless the model can score the shards at `path`."""
    check_dataset(path, stored)
    dataset = Dataset(path)
    if not dataset.pairs:
        raise InputError(f"{path}: holds no pairs of answers; make some by ptdmpi-data pairs")
    if dataset.row_length > model.seq_length:
        raise InputError(
            f"{path}: has rows of {dataset.row_length} tokens, and the model seq_length = "
            f"{model.seq_length}; legal: ptdmpi-data pairs --seq-length {model.seq_length}"
        )


def _score(model: InferenceModel, dataset: Dataset, world: World, name: str) -> dict[str, Any]:
    """Store the log-probabilities of the labels of one dataset, and return a table with the number
    of labels and the mean negative log-probability."""
    length = dataset.row_length
    shards: dict[str, Any] = {}
    total = 0.0
    labels = first = 0
    for header in dataset.headers:
        rows = (header.tokens - 1) // length
        values = np.zeros(header.tokens, dtype=np.float32)
        scored = _rows(model, dataset, range(first, first + rows))
        for row, of_row in scored.items():
            begin = (row - first) * length + 1
            values[begin : begin + length] = of_row
        if not np.isfinite(values).all():
            raise SharedInputError(f"{header.path}: {NOT_FINITE}")
        entry = world.on_root(partial(write_shard, header, values))
        shards[header.path.name] = entry
        total += float(values.sum(dtype=np.float64))
        labels += int(np.count_nonzero(values))
        first += rows
    world.on_root(partial(write_summary, dataset.directory, name, shards))
    return {
        "dataset": str(dataset.directory),
        "model": name,
        "labels": labels,
        "nats_per_label": -total / max(1, labels),
    }


def _rows(model: InferenceModel, dataset: Dataset, rows: range) -> dict[int, np.ndarray]:
    """Return the log-probabilities of the labels of each row, as a dictionary from the row's number
    to an array float32 [length]. Labels that the loss ignores have the value 0. Every rank gets the
    log-probabilities of all rows."""
    length = dataset.row_length
    each = rows_of(length, model)
    data = model.axes["data"]
    groups = [rows[at : at + each] for at in range(0, len(rows), each)][data.rank :: data.size]
    mine: dict[int, np.ndarray] = {}
    with progress("scoring", len(groups), "batch") as advance:
        for group in groups:
            batch = _batch(dataset, np.array(group))
            placed = as_tensors(batch).each(lambda tensor: tensor.to(model.device))
            answer = model.label_log_probabilities(placed)
            advance(1)
            if answer is not None:
                counts = torch.from_numpy(batch.weights) > 0
                kept = torch.where(counts, answer.t().float().cpu(), 0.0)
                mine |= dict(zip(group, kept.numpy(), strict=True))
    model.finish()
    scored: dict[int, np.ndarray] = {}
    for part in data.all_gather_object(model.share(mine)):
        scored |= part
    return scored


def _batch(dataset: Dataset, rows: np.ndarray) -> MicrobatchRows:
    """Return the given rows of a dataset as a micro-batch, in the form that training uses."""
    length = dataset.row_length
    tokens = dataset.read(rows, length)
    batch = MicrobatchRows(tokens[:, :-1], tokens[:, 1:], None, rows)

    def locate(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset of each sample, which is always number 0, and the sample's number in
        it."""
        return np.zeros_like(ids), ids

    batch = with_weights(LabelWeights([dataset], locate, length), batch)
    return with_documents(Windows([dataset], locate, length), batch)
