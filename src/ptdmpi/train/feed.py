"""From datasets on disk to microbatches on the device."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ptdmpi.base.words import counted
from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import Config, InputError
from ptdmpi.data.batches import Microbatch, Prefetcher, Steps, TrainBatches, ValidationBatches
from ptdmpi.data.bigram import Bigram
from ptdmpi.data.documents import (
    FormedBatches,
    LabelWeights,
    Locate,
    Windows,
    with_documents,
    with_weights,
)
from ptdmpi.data.labelled import LabelledBatches, in_order
from ptdmpi.data.masked import MaskedSamples
from ptdmpi.data.order import SampleOrder
from ptdmpi.data.shards import Dataset
from ptdmpi.evaluate.labelled import read
from ptdmpi.inference.tensors import as_batch
from ptdmpi.lineage.course import Course
from ptdmpi.lineage.trained_on import Samples, begun
from ptdmpi.model.batch import Batch, Placing
from ptdmpi.train.task_files import task_framing

if TYPE_CHECKING:  # it starts MPI, and data is also opened where there is none
    from ptdmpi.comm.world import Axes

# Validation goes through the pipeline in groups of microbatches, so that memory stays bounded.
VALIDATION_GROUP = 16


class SampleSource(Protocol):
    """Where the samples of a run come from: shards, or the files of a task."""

    train: Sequence[Samples]
    valid: Sequence[Samples]
    vocab_size: int

    def steps(self, order: SampleOrder, data: Communicator) -> Steps:
        """The training microbatches of one rank of the data axis, in this order."""

    def validation(self, number: int, data: Communicator) -> Iterator[Microbatch]:
        """This data rank's microbatches of a validation dataset, equally many on every rank."""

    def ids(self, number: int, sample: int) -> list[int]:
        """The tokens of a sample of a training dataset, for the eye."""

    def told(self) -> Iterator[str]:
        """What is said of it at the start."""


class ShardSource:
    """Tokens in files, of which windows are samples."""

    def __init__(self, config: Config) -> None:
        """Raises InputError if the datasets do not go together."""
        self.config = config
        self._train, self._valid = open_datasets(config)
        self.train: Sequence[Samples] = self._train
        self.valid: Sequence[Samples] = self._valid
        self.masked: MaskedSamples | None = None
        if config.model.masked:
            self.masked = masked_samples(config, self._train[0])
        self.vocab_size = vocabulary(config, self._train[0], self.masked)
        self.length = config.model.text_length

    def steps(self, order: SampleOrder, data: Communicator) -> Steps:
        batches = TrainBatches(
            self._train,
            order,
            self.length,
            global_size=self.config.batch.global_size,
            micro_size=self.config.batch.micro_size,
            data_rank=data.rank,
            data_size=data.size,
        )
        return FormedBatches(batches, self._form(self._train, order.locate))

    def _form(self, datasets: list[Dataset], locate: Locate) -> Callable[[Microbatch], Microbatch]:
        """What makes samples of windows of tokens."""
        windows = Windows(datasets, locate, self.length)
        if self.masked is not None:
            return partial(self.masked, windows)
        forms: list[Callable[[Microbatch], Microbatch]] = []
        if any(dataset.row_length for dataset in datasets):
            forms.append(partial(with_weights, LabelWeights(datasets, locate, self.length)))
        if self.config.data.document_boundaries:
            forms.append(partial(with_documents, windows))
        return lambda microbatch: reduce(lambda one, form: form(one), forms, microbatch)

    def validation(self, number: int, data: Communicator) -> Iterator[Microbatch]:
        dataset = self._valid[number]
        batches = self._validation(dataset, self.config.batch.micro_size, data.rank, data.size)
        form = self._form([dataset], partial(_first_samples, batches.samples))
        return map(form, batches.microbatches())

    def _validation(
        self, dataset: Dataset, micro_size: int, data_rank: int, data_size: int
    ) -> ValidationBatches:
        most = self.config.log.most_validated
        return ValidationBatches(
            dataset,
            self.length,
            micro_size=micro_size,
            data_rank=data_rank,
            data_size=data_size,
            max_samples=most,
        )

    def ids(self, number: int, sample: int) -> list[int]:
        found = self._train[number].read(np.array([sample]), self.length)
        return found[0, : self.length].tolist()

    def told(self) -> Iterator[str]:
        yield from ()

    def bigram_loss(self) -> float:
        """Nats per token of a bigram model of the training shards on the validation samples."""
        bigram = Bigram(self._train)
        pairs = [
            (batch.inputs, batch.labels)
            for dataset in self._valid
            for batch in self._validation(dataset, 1, 0, 1).microbatches()
        ]
        tokens = len(pairs) * self.config.model.seq_length
        return sum(bigram.loss(inputs, labels) for inputs, labels in pairs) / tokens


class TaskSource:
    """The files of a task, read and made tokens at the start."""

    def __init__(self, config: Config) -> None:
        """Raises InputError for a file that cannot be used, or where no tokenizer is known."""
        self.config, frame = config, task_framing(config)
        self.form = frame.form
        self.vocab_size = config.model.vocab_size or frame.needed
        if self.vocab_size < frame.needed:
            raise InputError(
                f"model.vocab_size = {self.vocab_size}, but the tokenizer of the task needs "
                f"{frame.needed}; legal: {frame.needed} or more, or 0: just as many"
            )
        paths = [part.path for part in config.data.train], config.data.valid_paths
        train, valid = ([read(Path(one), config.task, frame) for one in part] for part in paths)
        self._train, self._valid = train, valid
        self.train: Sequence[Samples] = train
        self.valid: Sequence[Samples] = valid

    @property
    def _micro(self) -> int:
        return self.config.batch.micro_size // self.config.task.sequences

    def steps(self, order: SampleOrder, data: Communicator) -> Steps:
        return LabelledBatches(
            self._train,
            order,
            self.form,
            samples=self.config.samples,
            micro=self._micro,
            data_rank=data.rank,
            data_size=data.size,
        )

    def validation(self, number: int, data: Communicator) -> Iterator[Microbatch]:
        most = self.config.log.most_validated
        return in_order(
            self._valid[number],
            self.form,
            self._micro,
            data_rank=data.rank,
            data_size=data.size,
            most=most,
        )

    def ids(self, number: int, sample: int) -> list[int]:
        file = self._train[number]
        return file.rows[sample * file.sequences].ids.tolist()

    def told(self) -> Iterator[str]:
        for file in (*self._train, *self._valid):
            cut = f"{file.cut} of {counted(len(file.rows), 'sequence')} cut"
            lost = f" by {counted(file.lost, 'token')}: longer than model.seq_length" * bool(
                file.cut
            )
            yield f"{file.path}: {counted(len(file.labels), 'sample')}, {cut}{lost}"


def source_of(config: Config) -> SampleSource:
    """The data of a run, opened. Raises InputError if they do not go together."""
    if config.task.kind != "none":
        return TaskSource(config)
    if config.model.classifies:
        raise InputError('model.output_head = "classes" is trained by a [task]')
    return ShardSource(config)


class Feed:
    """The data of a run, as one data rank sees it."""

    def __init__(self, config: Config, axes: "Axes", device: torch.device) -> None:
        self.config, self.axes, self.device = config, axes, device
        self.source = source_of(config)
        self.valid, self.vocab_size = self.source.valid, self.source.vocab_size
        world = axes.world
        now = world.broadcast_object(None if world.rank else begun(config, self.source.train))
        self.course = Course(config, now)
        self._placing = Placing(device)

    def steps(self, first: int) -> Prefetcher:
        """Microbatches of step `first` and the following ones, read ahead by a thread."""
        batches = self.source.steps(self.course.order, self.axes["data"])
        return Prefetcher(batches, first, self.config.run.steps)

    def place(self, microbatches: list[Microbatch]) -> list[Batch]:
        """As tensors on the device, sequence first, until the next call."""
        return self._placing.place([as_batch(microbatch) for microbatch in microbatches])

    def validation(self) -> Iterator[tuple[int, list[Microbatch]]]:
        """This data rank's validation microbatches, in groups of equal number on every rank, each
        with the number of its dataset."""
        for number in range(len(self.valid)):
            group: list[Microbatch] = []
            for microbatch in self.source.validation(number, self.axes["data"]):
                group.append(microbatch)
                if len(group) == VALIDATION_GROUP:
                    yield number, group
                    group = []
            if group:
                yield number, group

    def bigram_loss(self) -> float:
        """Nats per token of a bigram model of the training shards on the validation samples.

        Rank 0 fits it; the validation tokens are the same that every layout validates on.
        """
        if self.axes.world.rank or not isinstance(self.source, ShardSource):
            return 0.0
        return self.source.bigram_loss()


def open_datasets(config: Config) -> tuple[list[Dataset], list[Dataset]]:
    """The training and validation datasets. Raises InputError if they do not go together."""
    use_mmap = config.data.reader == "mmap"
    train = [Dataset(part.path, use_mmap) for part in config.data.train]
    valid = [Dataset(path, use_mmap) for path in config.data.valid_paths]
    paths = [*(part.path for part in config.data.train), *config.data.valid_paths]
    wanted, owner = config.data.tokenizer_sha256, "data.tokenizer_sha256"
    if wanted is None:
        wanted, owner = train[0].tokenizer_sha256, paths[0]
    for path, dataset in zip(paths, [*train, *valid], strict=True):
        if dataset.tokenizer_sha256 != wanted:
            raise InputError(
                f"{path} was made with tokenizer {dataset.tokenizer} (sha256 "
                f"{dataset.tokenizer_sha256[:12]}), but {owner} says {wanted[:12]}; "
                "all datasets of a run need the same tokenizer"
            )
        for name in ("vocab_size", "eod_id"):  # a hash may be given without a file behind it
            if getattr(dataset, name) != getattr(train[0], name):
                raise InputError(
                    f"{path} has {name} {getattr(dataset, name)}, but {paths[0]} has "
                    f"{getattr(train[0], name)}; all datasets of a run need the same"
                )
        _require_rows(config, path, dataset)
        dataset.samples(config.model.text_length)  # refuses a corpus shorter than one sequence
    if config.model.masked:
        masked_samples(config, train[0])  # refuses a tokenizer that does not tell words apart
    return train, valid


def _require_rows(config: Config, path: str, dataset: Dataset) -> None:
    """Raises InputError where a run would cut, mix or count conversations otherwise than they were
    packed."""
    rows = dataset.row_length
    if not rows:
        return
    if config.model.masked:
        raise InputError(f"{path} holds conversations, whose answers no masked model predicts")
    if rows != config.model.text_length:
        raise InputError(
            f"{path} holds conversations packed in rows of {rows} tokens, and model.seq_length = "
            f"{config.model.text_length}; legal: model.seq_length = {rows}, or ptdmpi-data chat "
            f"--seq-length {config.model.text_length}"
        )
    if not config.data.document_boundaries:
        raise InputError(
            f"{path} holds several conversations in a row, which must not see each other; legal: "
            "data.document_boundaries = true"
        )
    if config.log.bigram_baseline:
        raise InputError(
            f"log.bigram_baseline counts all tokens, and of {path} only answers count; legal: false"
        )


def masked_samples(config: Config, dataset: Dataset) -> MaskedSamples:
    return MaskedSamples(config.model, config.data, dataset, config.run.seed)


def vocabulary(config: Config, dataset: Dataset, masked: MaskedSamples | None = None) -> int:
    """How many rows the vocabulary's tables have. Raises InputError where these are too few for the
    ids of the shards (and the special tokens of a masked model)."""
    needed = dataset.vocab_size if masked is None else masked.vocabulary.size
    rows = config.model.vocab_size or needed
    if rows < needed:
        raise InputError(
            f"model.vocab_size = {rows}, but {dataset.directory} needs {needed}; legal: {needed} "
            "or more, or 0: just as many"
        )
    return rows


def _first_samples(count: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the samples of a validation stand; rows beyond the last sample repeat it."""
    return np.zeros_like(ids), np.minimum(ids, count - 1)
