"""From datasets on disk to microbatches on the device."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from ptdmpi.config import Config, InputError
from ptdmpi.data.batches import Microbatch, Prefetcher, TrainBatches, ValidationBatches
from ptdmpi.data.bigram import Bigram
from ptdmpi.data.documents import FormedBatches, Locate, Windows, with_documents
from ptdmpi.data.masked import MaskedSamples
from ptdmpi.data.shards import Dataset
from ptdmpi.lineage.course import Course
from ptdmpi.lineage.trained_on import begun
from ptdmpi.model.documents import Documents
from ptdmpi.model.stage import Batch

if TYPE_CHECKING:  # it starts MPI, and data is also opened where there is none
    from ptdmpi.comm.world import Axes

# Validation goes through the pipeline in groups of microbatches, so that memory stays bounded.
VALIDATION_GROUP = 16


class Feed:
    """The data of a run, as one data rank sees it."""

    def __init__(self, config: Config, axes: "Axes", device: torch.device) -> None:
        self.config, self.axes, self.device = config, axes, device
        self.train, self.valid = open_datasets(config)
        self.masked: MaskedSamples | None = None
        if config.model.masked:
            self.masked = masked_samples(config, self.train[0])
        self.vocab_size = vocabulary(config, self.train[0], self.masked)
        world = axes.world
        now = world.broadcast_object(None if world.rank else begun(config, self.train))
        self.course = Course(config, now)
        self.length = config.model.text_length

    def steps(self, first: int) -> Prefetcher:
        """Microbatches of step `first` and the following ones, read ahead by a thread."""
        config, data, order = self.config, self.axes["data"], self.course.order
        batches = TrainBatches(
            self.train,
            order,
            self.length,
            config.batch.global_size,
            config.batch.micro_size,
            data.rank,
            data.size,
        )
        formed = FormedBatches(batches, self._form(self.train, order.locate))
        return Prefetcher(formed, first, config.run.steps)

    def _form(self, datasets: list[Dataset], locate: Locate) -> Callable[[Microbatch], Microbatch]:
        """What makes samples of windows of tokens."""
        windows = Windows(datasets, locate, self.length)
        if self.masked is not None:
            return partial(self.masked, windows)
        if self.config.data.document_boundaries:
            return partial(with_documents, windows)
        return lambda microbatch: microbatch

    def place(self, microbatches: list[Microbatch]) -> list[Batch]:
        """As tensors on the device, sequence first."""
        return [self._batch(microbatch) for microbatch in microbatches]

    def _batch(self, microbatch: Microbatch) -> Batch:
        # [b, s] -> [s, b]: what sequence parallelism divides is then one piece of memory
        def sequence_first(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).t().contiguous().to(self.device)

        def perhaps(array: np.ndarray | None) -> torch.Tensor | None:
            return None if array is None else sequence_first(array)

        documents = None
        if microbatch.documents is not None:
            documents = Documents.of(torch.from_numpy(microbatch.documents), self.device)
        return Batch(
            inputs=sequence_first(microbatch.inputs),
            labels=sequence_first(microbatch.labels),
            weights=perhaps(microbatch.loss_mask),
            samples=torch.from_numpy(microbatch.sample_ids).to(self.device),
            documents=documents,
            masked=perhaps(microbatch.masked),
            types=perhaps(microbatch.types),
            order=perhaps(microbatch.order),
        )

    def validation(self) -> Iterator[tuple[int, list[Microbatch]]]:
        """This data rank's validation microbatches, in groups of equal number on every rank, each
        with the number of its dataset."""
        data = self.axes["data"]
        for number, dataset in enumerate(self.valid):
            batches = self._validation(dataset, self.config.batch.micro_size, data.rank, data.size)
            form = self._form([dataset], partial(_first_samples, batches.samples))
            group: list[Microbatch] = []
            for microbatch in batches.microbatches():
                group.append(form(microbatch))
                if len(group) == VALIDATION_GROUP:
                    yield number, group
                    group = []
            if group:
                yield number, group

    def _validation(
        self, dataset: Dataset, micro_size: int, data_rank: int, data_size: int
    ) -> ValidationBatches:
        samples, length = self.config.log.validate_samples, self.length
        most = None if samples == "all" else samples
        return ValidationBatches(dataset, length, micro_size, data_rank, data_size, most)

    def bigram_loss(self) -> float:
        """Nats per token of a bigram model of the training shards on the validation samples.

        Rank 0 fits it; the validation tokens are the same that every layout validates on.
        """
        if self.axes.world.rank:
            return 0.0
        bigram = Bigram(self.train)
        pairs = [
            (batch.inputs, batch.labels)
            for dataset in self.valid
            for batch in self._validation(dataset, 1, 0, 1).microbatches()
        ]
        tokens = len(pairs) * self.config.model.seq_length
        return sum(bigram.loss(inputs, labels) for inputs, labels in pairs) / tokens


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
        dataset.samples(config.model.text_length)  # refuses a corpus shorter than one sequence
    if config.model.masked:
        masked_samples(config, train[0])  # refuses a tokenizer that does not tell words apart
    return train, valid


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
