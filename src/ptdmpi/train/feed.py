"""Reading of a run's datasets from the disk, and the transfer of microbatches to the device."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import Config, InputError
from ptdmpi.data.batches import MicrobatchRows, Prefetcher, Steps, TrainBatches, ValidationBatches
from ptdmpi.data.bigram import Bigram
from ptdmpi.data.documents import (
    FormedBatches,
    LabelWeights,
    Locate,
    Windows,
    with_documents,
    with_weights,
)
from ptdmpi.data.masked import MaskedSamples
from ptdmpi.data.order import SampleOrder
from ptdmpi.data.own import is_own
from ptdmpi.data.scores.reference import REFERENCE, with_references
from ptdmpi.data.scores.stored import LabelScores, ScoredSamples, StoredScores
from ptdmpi.data.scores.teacher import TEACHER, check_teacher, with_teacher
from ptdmpi.data.shards import Dataset
from ptdmpi.inference.tensors import as_tensors
from ptdmpi.lineage.course import Course
from ptdmpi.lineage.trained_on import Samples, begun
from ptdmpi.model.batch import Microbatch, Placing
from ptdmpi.model.sequence.context import ContextAxis
from ptdmpi.plan.layout.grid import CONTEXT
from ptdmpi.train import tasks
from ptdmpi.train.own_source import OwnSource

# imported only for types: importing this module starts MPI, but some commands open data without MPI
if TYPE_CHECKING:
    from ptdmpi.comm.world import Axes

# the number of validation microbatches that are on the device at the same time, to limit the memory
# that a validation needs
VALIDATION_GROUP = 16


class SampleSource(Protocol):
    """The interface of a source of samples for a run. A sample is, for example, a window of tokens
    in shards, or a line in a file of a task."""

    train: Sequence[Samples]
    valid: Sequence[Samples]
    vocab_size: int

    def steps(self, order: SampleOrder, data: Communicator) -> Steps:
        """Return the training microbatches of one data rank, in the order of training. `data` is
        the communicator of the data axis.
        """

    def validation(self, number: int, data: Communicator) -> Iterator[MicrobatchRows]:
        """Yield the microbatches of validation dataset `number` that this data rank reads.

        The number of microbatches is the same on every data rank.
        """

    def ids(self, number: int, sample: int) -> list[int]:
        """Return the tokens of one sample of training dataset `number`, so that they can be shown
        to the user."""

    def remarks(self) -> Iterator[str]:
        """Yield lines about the samples, which a run logs at its start."""


class ShardSource:
    """A source whose samples are windows of the tokens in shards."""

    def __init__(self, config: Config) -> None:
        """Open the datasets. Raises InputError if the datasets are not compatible with each
        other."""
        self.config = config
        self._train, self._valid = open_datasets(config)
        # dataset -> stored outputs of a model. If the run compares pairs of answers (DPO), each
        # dataset has outputs of the reference model. If the run has a teacher, each training
        # dataset has outputs of the teacher.
        self._scores: dict[Dataset, StoredScores] = {}
        if config.preference.compares:
            self._scores = {
                dataset: StoredScores(REFERENCE, dataset)
                for dataset in (*self._train, *self._valid)
            }
        elif config.distillation.teaches:
            self._scores = {dataset: StoredScores(TEACHER, dataset) for dataset in self._train}
            for scores in self._scores.values():
                check_teacher(scores, config)
        self.train = self._scored(self._train)
        self.valid = self._scored(self._valid)
        self.masked: MaskedSamples | None = None
        if config.model.masked:
            self.masked = masked_samples(config, self._train[0])
        self.vocab_size = vocabulary(config, self._train[0], self.masked)
        self.length = config.model.text_length

    def _scored(self, datasets: list[Dataset]) -> Sequence[Samples]:
        """Return the datasets as sources of samples. If a dataset has stored outputs of a model,
        the hash of the source covers these outputs, too, so that a resumed run detects changed
        outputs."""
        return [
            ScoredSamples(dataset, self._scores[dataset]) if dataset in self._scores else dataset
            for dataset in datasets
        ]

    def steps(self, order: SampleOrder, data: Communicator) -> Steps:
        """Return this rank's training microbatches."""
        batches = TrainBatches(
            self._train,
            order,
            seq_length=self.length,
            global_size=self.config.batch.global_size,
            micro_size=self.config.batch.micro_size,
            data_rank=data.rank,
            data_size=data.size,
        )
        return FormedBatches(batches, self._form(self._train, order.locate))

    def _form(
        self, datasets: list[Dataset], locate: Locate
    ) -> Callable[[MicrobatchRows], MicrobatchRows]:
        """Return the function that makes training samples from windows of tokens.

        `locate` maps the number of a sample to its dataset and its position in the dataset.
        """
        windows = Windows(datasets, locate, self.length)
        if self.masked is not None:
            return partial(self.masked, windows)
        forms: list[Callable[[MicrobatchRows], MicrobatchRows]] = []
        if any(dataset.row_length for dataset in datasets):
            forms.append(partial(with_weights, LabelWeights(datasets, locate, self.length)))
        if self.config.data.document_boundaries:
            forms.append(partial(with_documents, windows))
        if all(dataset in self._scores for dataset in datasets):
            scores = [self._scores[dataset] for dataset in datasets]
            labels = LabelScores(datasets, scores, locate, self.length)
            add = with_references if self.config.preference.compares else with_teacher
            forms.append(partial(add, labels))

        def apply_all(microbatch: MicrobatchRows) -> MicrobatchRows:
            """Convert windows of tokens to samples, by calling all functions in `forms` in turn."""
            for form in forms:
                microbatch = form(microbatch)
            return microbatch

        return apply_all

    def validation(self, number: int, data: Communicator) -> Iterator[MicrobatchRows]:
        """Yield the microbatches of a validation dataset that this data rank reads."""
        dataset = self._valid[number]
        batches = ValidationBatches(
            dataset,
            self.length,
            micro_size=self.config.batch.micro_size,
            data_rank=data.rank,
            data_size=data.size,
            max_samples=self.config.log.most_validated,
        )
        form = self._form([dataset], partial(_first_samples, batches.samples))
        return map(form, batches.microbatches())

    def ids(self, number: int, sample: int) -> list[int]:
        """Return the tokens of one training sample."""
        rows = self._train[number].read(np.array([sample]), self.length)
        return rows[0, : self.length].tolist()

    def remarks(self) -> Iterator[str]:
        """Yield a line for each dataset that has stored outputs of a model. The line names the
        model."""
        for dataset, scores in self._scores.items():
            yield f"{dataset.directory}: log-probabilities of {scores.model}"

    def bigram_loss(self) -> float:
        """Compute a bigram model from the training shards, and return its validation loss in nats
        per token."""
        bigram = Bigram(self._train)
        pairs = [pair for dataset in self._valid for pair in self._validated_pairs(dataset)]
        tokens = len(pairs) * self.config.model.seq_length
        return sum(bigram.loss(inputs, labels) for inputs, labels in pairs) / tokens

    def _validated_pairs(self, dataset: Dataset) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the inputs and the labels of each validation sample of `dataset`, both with shape
        [1, sequence length]. The samples are the same in every layout.
        """
        batches = ValidationBatches(
            dataset,
            self.length,
            micro_size=1,
            data_rank=0,
            data_size=1,
            max_samples=self.config.log.most_validated,
        )
        for batch in batches.microbatches():
            yield batch.inputs, batch.labels


def source_of(config: Config) -> SampleSource:
    """Open the data of a run, and return its source of samples. Raises InputError if the data
    cannot be used."""
    if config.task.kind != "none":
        return tasks.TaskSource(config)
    if config.model.classifies:
        raise InputError('model.output_head = "classes" is trained by a [task]')
    if any(is_own(part.path) for part in config.data.train):
        if config.distillation.teaches:
            raise InputError(
                "distillation.weight needs shards with the outputs of a teacher, and data.train is "
                "a data source of your own; legal: distillation.weight = 0"
            )
        return OwnSource(config)
    return ShardSource(config)


class Feed:
    """The data of a run, as one rank reads it.

    `course` determines the order of the samples, and the number of samples and tokens after each
    step.
    """

    def __init__(self, config: Config, axes: "Axes", device: torch.device) -> None:
        """Open the data of the run. Every rank must create its `Feed` object at the same time.
        Raises InputError if the data cannot be used."""
        self.config = config
        self.axes = axes
        self.source = source_of(config)
        self.valid = self.source.valid
        self.vocab_size = self.source.vocab_size
        world = axes.world
        now = world.broadcast_object(None if world.rank else begun(config, self.source.train))
        self.course = Course(config, now)
        self._placing = Placing(device)

    def steps(self, first: int) -> Prefetcher:
        """Return the microbatches of step `first` (counted from 0) and of all later steps. A thread
        reads them in advance.
        """
        batches = self.source.steps(self.course.order, self.axes["data"])
        return Prefetcher(batches, first, self.config.run.steps)

    def place(self, microbatches: list[MicrobatchRows], modules: int = 0) -> list[Microbatch]:
        """Return microbatches as tensors of shape [sequence length, microbatch size] on the device.
        The tensors are valid until the next call of this method. If the model has modules for
        multi-token prediction, `modules` is their number, and the microbatches also have the
        further tokens that these modules need.

        Every rank of the context axis reads complete samples. This method returns only the
        positions that this rank computes.
        """
        here = ContextAxis(self.axes[CONTEXT]).positions
        whole = (as_tensors(rows).with_ahead(modules) for rows in microbatches)
        return self._placing.place([batch.at(here) for batch in whole])

    def validation(self) -> Iterator[tuple[int, list[MicrobatchRows]]]:
        """Yield pairs: the number of a validation dataset, and a list of microbatches that this
        data rank reads from this dataset.

        Every rank yields the same number of lists, and the i-th lists of all ranks have the same
        length.
        """
        for number in range(len(self.valid)):
            group: list[MicrobatchRows] = []
            for microbatch in self.source.validation(number, self.axes["data"]):
                group.append(microbatch)
                if len(group) == VALIDATION_GROUP:
                    yield number, group
                    group = []
            if group:
                yield number, group

    def bigram_loss(self) -> float:
        """On rank 0, return the validation loss of a bigram model (see `ShardSource.bigram_loss`).
        On all other ranks, and if the samples do not come from shards, return 0.0. The loss does
        not depend on the layout.
        """
        if self.axes.world.rank or not isinstance(self.source, ShardSource):
            return 0.0
        return self.source.bigram_loss()


def open_datasets(config: Config) -> tuple[list[Dataset], list[Dataset]]:
    """Open the training and the validation datasets of a run.

    Raises InputError if the datasets are not compatible with each other: all datasets must have the
    same tokenizer, and each dataset must have at least one sample.
    """
    use_mmap = config.data.reader == "mmap"
    verified = config.data.verify == "read"
    train = [Dataset(part.path, use_mmap, verified=verified) for part in config.data.train]
    valid = [Dataset(path, use_mmap, verified=verified) for path in config.data.valid_paths]
    paths = [*(part.path for part in config.data.train), *config.data.valid_paths]
    wanted = config.data.tokenizer_sha256
    owner = "data.tokenizer_sha256"
    if wanted is None:
        wanted = train[0].tokenizer_sha256
        owner = paths[0]
    for path, dataset in zip(paths, [*train, *valid], strict=True):
        if dataset.tokenizer_sha256 != wanted:
            raise InputError(
                f"{path} was made with tokenizer {dataset.tokenizer} (sha256 "
                f"{dataset.tokenizer_sha256[:12]}), but {owner} says {wanted[:12]}; "
                "all datasets of a run need the same tokenizer"
            )
        # also compare the vocabulary, because two different tokenizers may have the same recorded
        # hash
        for name in ("vocab_size", "eod_id"):
            if getattr(dataset, name) != getattr(train[0], name):
                raise InputError(
                    f"{path} has {name} {getattr(dataset, name)}, but {paths[0]} has "
                    f"{getattr(train[0], name)}; all datasets of a run need the same"
                )
        _require_rows(config, path, dataset)
        dataset.samples(config.model.text_length)  # raises InputError if there is no sample
    if config.model.masked:
        # raises InputError if the tokenizer does not separate words
        masked_samples(config, train[0])
    return train, valid


def _require_rows(config: Config, path: str, dataset: Dataset) -> None:
    """Raise InputError if `dataset` does not fit the settings of the run. A run that compares pairs
    of answers needs datasets of pairs, and no other run may use such datasets. If the samples are
    packed conversations, the run needs a causal model, a sequence length equal to the length of the
    packed rows, and `data.document_boundaries`. Such a run cannot have a bigram baseline.
    """
    rows = dataset.row_length
    compares = config.preference.compares
    if compares and not dataset.pairs:
        raise InputError(
            f'{path} holds no pairs of answers, which preference.method = "dpo" compares; legal: '
            "shards by ptdmpi-data pairs"
        )
    if dataset.pairs and not compares:
        raise InputError(
            f"{path} holds pairs of answers, of which only one should be learned; legal: "
            'preference.method = "dpo"'
        )
    if not rows:
        return
    if config.model.masked:
        raise InputError(f"{path} holds conversations, and a masked model does not predict answers")
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
            f"log.bigram_baseline counts all tokens, but in {path} only answers count; legal: false"
        )


def masked_samples(config: Config, dataset: Dataset) -> MaskedSamples:
    """Return the object that makes samples for a masked language model from windows of
    `dataset`."""
    return MaskedSamples(config.model, config.data, dataset, config.run.seed)


def vocabulary(config: Config, dataset: Dataset, masked: MaskedSamples | None = None) -> int:
    """Return the size of the vocabulary: the number of rows of the embedding.

    Raises InputError if `model.vocab_size` is too small for the ids of the shards, or for the
    special tokens of a masked model (`masked`).
    """
    needed = dataset.vocab_size if masked is None else masked.vocabulary.size
    rows = config.model.vocab_size or needed
    if rows < needed:
        raise InputError(
            f"model.vocab_size = {rows}, but {dataset.directory} needs {needed}; legal: {needed} "
            "or more, or 0: just as many"
        )
    return rows


def _first_samples(count: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays with an entry for each sample number in `ids`: the number of the sample's
    dataset, which is always 0, and the sample's position in this dataset. A sample number of
    `count` or greater only fills up the last microbatch; its position is `count` - 1, the position
    of the last sample.
    """
    return np.zeros_like(ids), np.minimum(ids, count - 1)
