"""Which document each token of a window of a shard is of, what it weighs as a label, and samples
that respect that."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np

from ptdmpi.config import InputError
from ptdmpi.data.batches import Microbatch, Steps
from ptdmpi.data.shards import Dataset

_OPEN_DOCUMENTS = 512  # shards whose document offsets are mapped at a time

_OPEN_WEIGHTS = 512  # shards whose weights are mapped at a time

# global sample numbers [n] -> datasets and samples of them, int64 [n] each
Locate = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class Windows:
    """Windows of `length` + 1 tokens: where they stand in the shards, and their documents."""

    def __init__(self, datasets: Sequence[Dataset], locate: Locate, length: int) -> None:
        self._datasets, self._locate, self._length = datasets, locate, length
        # maps are kept by shard; a function of its own, so that no cache holds this object
        self._offsets = lru_cache(_OPEN_DOCUMENTS)(partial(_document_offsets, tuple(datasets)))

    def documents(self, sample_ids: np.ndarray) -> np.ndarray:
        """int64 [n, length + 1]: numbers that tell the documents of a window apart, from 0."""
        numbers = np.zeros((len(sample_ids), self._length + 1), dtype=np.int64)
        datasets, samples = self._locate(sample_ids)
        for row, (dataset, sample) in enumerate(
            zip(datasets.tolist(), samples.tolist(), strict=True)
        ):
            (shard,), (start,) = self._datasets[dataset].places(np.array([sample]), self._length)
            offsets = self._offsets(dataset, int(shard))
            # in the offsets' own type: another would convert all of them
            ends = np.array([start, start + self._length], dtype=offsets.dtype)
            first, last = np.searchsorted(offsets, ends, side="right")
            numbers[row, offsets[first:last].astype(np.int64) - start] = 1
        return numbers.cumsum(axis=1)


class LabelWeights:
    """The weights that shards with rows give their tokens as labels, sample by sample; the tokens
    of datasets without rows count all."""

    def __init__(self, datasets: Sequence[Dataset], locate: Locate, length: int) -> None:
        self._datasets, self._locate, self._length = datasets, locate, length
        self._weights = lru_cache(_OPEN_WEIGHTS)(partial(_shard_weights, tuple(datasets)))

    def of(self, sample_ids: np.ndarray) -> np.ndarray:
        """float32 [n, length], each the weight of a label, so of the token behind an input. Raises
        InputError for what is neither 0 nor 1."""
        weights = np.ones((len(sample_ids), self._length), dtype=np.float32)
        datasets, samples = self._locate(sample_ids)
        for row, (number, sample) in enumerate(
            zip(datasets.tolist(), samples.tolist(), strict=True)
        ):
            dataset = self._datasets[number]
            if dataset.row_length:
                (shard,), (start,) = dataset.places(np.array([sample]), self._length)
                stored = self._weights(number, int(shard))
                weights[row] = stored[start + 1 : start + 1 + self._length]
        if weights.max() > 1:
            raise InputError(
                f"dataset {self._datasets[0].directory}, or one beside it, has a weight of "
                f"{weights.max():g}; legal: 0 or 1; ptdmpi-data verify tells where"
            )
        return weights


def with_weights(weights: LabelWeights, microbatch: Microbatch) -> Microbatch:
    """The microbatch in which labels count by their weights in the shards."""
    counts = weights.of(microbatch.sample_ids)
    if microbatch.loss_mask is not None:
        counts *= microbatch.loss_mask
    return microbatch._replace(loss_mask=counts)


def _shard_weights(datasets: Sequence[Dataset], dataset: int, shard: int) -> np.ndarray:
    return datasets[dataset].weights(shard)


def _document_offsets(datasets: Sequence[Dataset], dataset: int, shard: int) -> np.ndarray:
    return datasets[dataset].documents(shard)


def with_documents(windows: Windows, microbatch: Microbatch) -> Microbatch:
    """The microbatch whose attention and positions begin anew in each document.

    The last token of a document has no label: what follows is another text.
    """
    numbers = windows.documents(microbatch.sample_ids)
    if not numbers.any():
        return microbatch
    counts = (numbers[:, 1:] == numbers[:, :-1]).astype(np.float32)
    if microbatch.loss_mask is not None:
        counts *= microbatch.loss_mask
    inside = numbers[:, :-1]
    return microbatch._replace(documents=inside if inside.any() else None, loss_mask=counts)


class FormedBatches:
    """Training batches whose windows are made into samples, by the thread that reads them."""

    def __init__(self, batches: Steps, form: Callable[[Microbatch], Microbatch]) -> None:
        self._batches, self._form = batches, form

    def step(self, k: int) -> list[Microbatch]:
        return [self._form(microbatch) for microbatch in self._batches.step(k)]
