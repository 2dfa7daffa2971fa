"""The outputs of a model that are stored with a dataset (`ptdmpi-data score`): the
log-probabilities of a reference model for pairs of answers, or the most probable tokens of a
teacher."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptdmpi.base.progress import progress
from ptdmpi.comm.world import World
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.data.batches import MicrobatchRows
from ptdmpi.data.documents import LabelWeights, Windows, with_documents, with_weights
from ptdmpi.data.scores.reference import REFERENCE
from ptdmpi.data.scores.stored import ScoreKind, ScoreWriter
from ptdmpi.data.scores.teacher import IDS, LOGS, TEACHER
from ptdmpi.data.shards import Dataset
from ptdmpi.evaluate.run import check_dataset
from ptdmpi.evaluate.scoring import rows_of
from ptdmpi.generate.sampling import NOT_FINITE
from ptdmpi.inference.model import InferenceModel, open_inference
from ptdmpi.inference.stored import StoredModel, kind_of
from ptdmpi.inference.tensors import as_tensors

# The number of batches that each data rank computes before rank 0 writes their scores.
_BATCHES = 8

Arrays = Mapping[str, np.ndarray]


class Scorer(ABC):
    """The base class of objects that compute the stored outputs of a model. A subclass defines the
    windows for which the model computes outputs, and the arrays that are stored for each window. A
    window is a training sample of `length` tokens. If `documents` is True, no token attends to
    another document.
    """

    kind: ScoreKind
    length: int
    documents: bool

    def __init__(self, model: InferenceModel) -> None:
        self.model = model

    def on_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device of the model."""
        return tensor.to(self.model.device)

    @abstractmethod
    def check(self, path: Path, dataset: Dataset) -> None:
        """Set `length` and `documents` for a dataset. Raise InputError if these outputs cannot be
        computed for the dataset."""

    @abstractmethod
    def rows(self) -> dict[str, tuple[type, tuple[int, ...]]]:
        """Return the data type and the shape of a token's row in each array. The keys are the
        suffixes of the arrays' file names.
        """

    @abstractmethod
    def arrays(self, batch: MicrobatchRows) -> dict[str, Tensor] | None:
        """Return the arrays of a batch, each [length, sequences, ...], on a rank that has the last
        pipeline stage. The keys are the suffixes of the arrays' file names. Return None on other
        ranks.
        """

    @abstractmethod
    def total(self, arrays: Arrays, counts: np.ndarray) -> float:
        """Return the sum of one quantity over the labels of n windows. The quantity is, for
        example, the log-probability of the label. The command divides this sum by the number of
        labels, and reports the resulting mean. Only labels for which `counts` [n, length] is True
        contribute.
        """

    @abstractmethod
    def mean(self, mean: float) -> dict[str, float]:
        """Return the mean under the name that it has in the printed table, as name -> value. `mean`
        is the result of `total`, divided by the number of labels.
        """

    def more(self) -> dict[str, Any]:
        """Return further entries for the summary that is stored with the arrays."""
        return {}


class ReferenceScorer(Scorer):
    """The scorer for a reference model, whose stored outputs are the log-probability of each label
    in a dataset of pairs of answers."""

    kind = REFERENCE
    documents = True

    def check(self, path: Path, dataset: Dataset) -> None:
        if not dataset.pairs:
            raise InputError(
                f"{path}: holds no pairs of answers; make some by ptdmpi-data pairs, or store the "
                "outputs of a teacher with --top"
            )
        if dataset.row_length > self.model.seq_length:
            raise InputError(
                f"{path}: has rows of {dataset.row_length} tokens, but the model has seq_length = "
                f"{self.model.seq_length}; legal: ptdmpi-data pairs --seq-length "
                f"{self.model.seq_length}"
            )
        self.length = dataset.row_length

    def rows(self) -> dict[str, tuple[type, tuple[int, ...]]]:
        return {"": (np.float32, ())}

    def arrays(self, batch: MicrobatchRows) -> dict[str, Tensor] | None:
        placed = as_tensors(batch).each(self.on_device)
        logs = self.model.label_log_probabilities(placed)
        if logs is None:
            return None
        if placed.weights is not None:
            logs = torch.where(placed.weights > 0, logs, 0.0)
        return {"": logs}

    def total(self, arrays: Arrays, counts: np.ndarray) -> float:
        return float(arrays[""][counts].sum(dtype=np.float64))

    def mean(self, mean: float) -> dict[str, float]:
        return {"nats_per_label": -mean}


class TeacherScorer(Scorer):
    """The scorer for a teacher, whose stored outputs are the `top` most probable tokens at the
    position of each label. If `seq_length` or `documents` is None, the value from the teacher's own
    training is used.
    """

    kind = TEACHER

    def __init__(
        self, model: InferenceModel, top: int, seq_length: int | None, documents: bool | None
    ) -> None:
        super().__init__(model)
        if top > model.vocab_size:
            raise InputError(f"--top {top}: legal: 1 to {model.vocab_size}, the vocabulary")
        self.top = top
        self.wanted = seq_length or model.seq_length
        if self.wanted > model.seq_length:
            raise InputError(f"--seq-length {seq_length}: legal: 1 to {model.seq_length}")
        own = model.config.data.document_boundaries
        self.documents = own if documents is None else documents

    def check(self, path: Path, dataset: Dataset) -> None:
        if dataset.pairs:
            raise InputError(f"{path}: holds pairs of answers, which exclude distillation")
        if dataset.row_length and dataset.row_length != self.wanted:
            raise InputError(
                f"{path}: has rows of {dataset.row_length} tokens; legal: --seq-length "
                f"{dataset.row_length}"
            )
        if dataset.row_length and not self.documents:
            raise InputError(f"{path}: has rows of several documents; legal: --document-boundaries")
        self.length = self.wanted
        dataset.samples(self.length)  # raises InputError if there is no sample

    def rows(self) -> dict[str, tuple[type, tuple[int, ...]]]:
        ids = np.uint16 if self.model.vocab_size <= 1 << 16 else np.uint32
        return {IDS: (ids, (self.top,)), LOGS: (np.float32, (self.top,))}

    def arrays(self, batch: MicrobatchRows) -> dict[str, Tensor] | None:
        placed = as_tensors(batch).each(self.on_device)
        best = self.model.top_log_probabilities(placed, self.top)
        if best is None:
            return None
        return dict(zip((IDS, LOGS), best, strict=True))

    def total(self, arrays: Arrays, counts: np.ndarray) -> float:
        return float(np.exp(arrays[LOGS][counts].astype(np.float64)).sum())

    def mean(self, mean: float) -> dict[str, float]:
        return {"probability_kept": mean}

    def more(self) -> dict[str, Any]:
        return {"top": self.top, "seq_length": self.length, "document_boundaries": self.documents}


def score(
    run: Path,
    paths: tuple[Path, ...],
    world: World,
    *,
    top: int = 0,
    seq_length: int | None = None,
    documents: bool | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Store the outputs of a model with datasets, and return a table of results for each dataset.
    Every rank calls this function.

    With `top` = 0, the datasets have pairs of answers, and the outputs are the log-probabilities of
    the labels. With `top` above 0, the outputs are the `top` most probable tokens at the position
    of each label, for windows of `seq_length` tokens. `options` are the other options of the
    command. If an option, the model or a dataset cannot be used, raise InputError on every rank.
    """
    model, stored = open_inference(
        run,
        world,
        options["layout"],
        options["precision"],
        adapter=options["adapter"],
        kind=kind_of(options["ema"]),
    )
    scorer: Scorer = ReferenceScorer(model)
    if top:
        scorer = TeacherScorer(model, top, seq_length, documents)
    for path in paths:
        world.on_root(partial(_check, path, stored, scorer))
    name = f"{stored.checkpoint}, {model.config.precision.compute}"
    if options["adapter"] is not None:
        name += f", adapters {options['adapter']}"
    return [_score(scorer, path, world, name) for path in paths]


def _check(path: Path, stored: StoredModel, scorer: Scorer) -> None:
    """Raise InputError unless the model can score the shards at `path`."""
    check_dataset(path, stored)
    scorer.check(path, Dataset(path))


def _score(scorer: Scorer, path: Path, world: World, name: str) -> dict[str, Any]:
    """Store the outputs of the model `name` for the dataset at `path`. Return the table of results,
    with the number of labels and the mean per label (`Scorer.mean`)."""
    dataset = Dataset(path, verified=True)
    scorer.check(path, dataset)
    shards: dict[str, Any] = {}
    total = 0.0
    labels = first = 0
    for header in dataset.headers:
        rows = (header.tokens - 1) // scorer.length
        with ScoreWriter(scorer.kind, header) as writer:
            world.on_root(partial(writer.open, scorer.rows()))
            world.on_root(partial(writer.skip, 1))
            for arrays, counts in _blocks(scorer, dataset, range(first, first + rows)):
                flat = {key: value.reshape(-1, *value.shape[2:]) for key, value in arrays.items()}
                world.on_root(partial(writer.append, flat))
                total += scorer.total(arrays, counts)
                labels += int(counts.sum())
            world.on_root(partial(writer.skip, header.tokens - 1 - rows * scorer.length))
            shards[header.path.name] = world.on_root(writer.close)
        first += rows
    summary = {"model": name, **scorer.more(), "shards": shards}
    world.on_root(partial(scorer.kind.write_summary, dataset.directory, summary))
    return {
        "dataset": str(dataset.directory),
        "model": name,
        "labels": labels,
        **scorer.mean(total / max(1, labels)),
    }


def _blocks(
    scorer: Scorer, dataset: Dataset, rows: range
) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Compute the windows `rows` of a dataset, and yield their arrays in order, n windows at a
    time. For every n windows, yield two values. The first value is a table of the arrays, each [n,
    length, ...], whose keys are the suffixes of the arrays' file names. The second value is a mask
    [n, length], which is True for labels that count in the loss. Every rank gets the arrays of all
    windows.
    """
    model = scorer.model
    each = rows_of(scorer.length, model)
    data = model.axes["data"]
    groups = [rows[at : at + each] for at in range(0, len(rows), each)]
    most = _BATCHES * data.size
    with progress("scoring", -(-len(groups) // data.size), "batch") as advance:
        for start in range(0, len(groups), most):
            mine: dict[int, tuple[dict[str, np.ndarray], np.ndarray]] = {}
            for group in groups[start : start + most][data.rank :: data.size]:
                mine |= _windows(scorer, dataset, group)
                advance(1)
            model.finish()
            parts: dict[int, tuple[dict[str, np.ndarray], np.ndarray]] = {}
            for part in data.all_gather_object(model.share(mine)):
                parts |= part
            ordered = [parts[row] for row in sorted(parts)]
            arrays = {
                key: np.stack([window[key] for window, _ in ordered]) for key in scorer.rows()
            }
            if any(np.isnan(values).any() for values in arrays.values()):
                raise SharedInputError(f"{dataset.directory}: {NOT_FINITE}")
            yield arrays, np.stack([counts for _, counts in ordered])


def _windows(
    scorer: Scorer, dataset: Dataset, group: range
) -> dict[int, tuple[dict[str, np.ndarray], np.ndarray]]:
    """Return for each window in `group` its arrays, by the suffixes of their file names, and the
    mask of the labels that count in the loss. A rank that does not have the last stage returns an
    empty dictionary.
    """
    batch = _batch(scorer, dataset, np.array(group))
    answer = scorer.arrays(batch)
    if answer is None:
        return {}
    counts = np.ones(batch.labels.shape, dtype=bool)
    if batch.weights is not None:
        counts = batch.weights > 0
    arrays = {key: _by_sequence(values) for key, values in answer.items()}
    return {
        row: ({key: values[at] for key, values in arrays.items()}, counts[at])
        for at, row in enumerate(group)
    }


def _by_sequence(values: Tensor) -> np.ndarray:
    """Return the tensor [positions, sequences, ...] as a numpy array [sequences, positions, ...].
    Floating-point numbers become float32.
    """
    values = values.transpose(0, 1).cpu()
    if values.is_floating_point():
        values = values.float()
    by_sequence: np.ndarray = values.numpy()
    return by_sequence


def _batch(scorer: Scorer, dataset: Dataset, rows: np.ndarray) -> MicrobatchRows:
    """Return the given windows of a dataset as a microbatch, in the form that training uses."""
    length = scorer.length
    tokens = dataset.read(rows, length)
    batch = MicrobatchRows(tokens[:, :-1], tokens[:, 1:], None, rows)

    def locate(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of each sample's dataset, and the number of the sample in this dataset.
        There is only one dataset, so its number is 0."""
        return np.zeros_like(ids), ids

    if dataset.row_length:
        batch = with_weights(LabelWeights([dataset], locate, length), batch)
    if scorer.documents:
        batch = with_documents(Windows([dataset], locate, length), batch)
    return batch
