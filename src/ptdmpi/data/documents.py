"""Information that microbatches have in addition to the tokens: the number of each token's
document, and the weight of each label."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np

from ptdmpi.config import InputError
from ptdmpi.data.batches import MicrobatchRows, Steps
from ptdmpi.data.shards import Dataset

_OPEN_DOCUMENTS = 512  # maximum number of shards whose document offsets are mapped at a time.
_OPEN_WEIGHTS = 512  # maximum number of shards whose weights are mapped at a time

# A function that converts global sample numbers [n] to two arrays (int64 [n] each): the number of
# each sample's dataset, and the number of the sample in this dataset.
Locate = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class Windows:
    """The boundaries of documents in samples of `datasets`; a sample is a window of `length` + 1
    tokens."""

    def __init__(self, datasets: Sequence[Dataset], locate: Locate, length: int) -> None:
        self._datasets = datasets
        self._locate = locate
        self._length = length
        # The cache contains memory maps of shards. The cached function is not a method of this
        # object; otherwise the cache would keep this object alive.
        self._offsets = lru_cache(_OPEN_DOCUMENTS)(partial(_document_offsets, tuple(datasets)))

    def documents(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return for each token of each sample the number of its document in the window, counted
        from 0.

        `sample_ids` is int [n]; the result is int64 [n, length + 1].
        """
        numbers = np.zeros((len(sample_ids), self._length + 1), dtype=np.int64)
        datasets, samples = self._locate(sample_ids)
        for row, (dataset, sample) in enumerate(
            zip(datasets.tolist(), samples.tolist(), strict=True)
        ):
            (shard,), (start,) = self._datasets[dataset].places(np.array([sample]), self._length)
            offsets = self._offsets(dataset, int(shard))
            # give `ends` the data type of the offsets; otherwise numpy would convert all offsets to
            # the type of `ends`
            ends = np.array([start, start + self._length], dtype=offsets.dtype)
            first, last = np.searchsorted(offsets, ends, side="right")
            numbers[row, offsets[first:last].astype(np.int64) - start] = 1
        return numbers.cumsum(axis=1)


class LabelWeights:
    """The weights of the labels of samples, read from the shards. Only shards with packed rows
    store weights.

    In datasets without packed rows every token has the weight 1.
    """

    def __init__(self, datasets: Sequence[Dataset], locate: Locate, length: int) -> None:
        self._datasets = datasets
        self._locate = locate
        self._length = length
        self._weights = lru_cache(_OPEN_WEIGHTS)(partial(_shard_weights, tuple(datasets)))

    def of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the weight of each label, float32 [n, length], for the samples `sample_ids` (int
        [n]).

        A label is the token after an input. Raise InputError for a weight that is neither 0 nor 1.
        """
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
                f"dataset {self._datasets[0].directory}, or another training dataset, has a weight "
                f"of {weights.max():g}; legal: 0 or 1; ptdmpi-data verify shows where"
            )
        return weights


def with_weights(weights: LabelWeights, microbatch: MicrobatchRows) -> MicrobatchRows:
    """Return a copy of the microbatch whose `weights` are multiplied by the stored weights of its
    labels."""
    counts = weights.of(microbatch.samples)
    if microbatch.weights is not None:
        counts *= microbatch.weights
    return microbatch._replace(weights=counts)


def _shard_weights(datasets: Sequence[Dataset], dataset: int, shard: int) -> np.ndarray:
    return datasets[dataset].weights(shard)


def _document_offsets(datasets: Sequence[Dataset], dataset: int, shard: int) -> np.ndarray:
    return datasets[dataset].documents(shard)


def with_documents(windows: Windows, microbatch: MicrobatchRows) -> MicrobatchRows:
    """Return a copy of the microbatch in which each token has the number of its document. With
    these numbers, attention and positions start again in each document. If no row contains more
    than one document, return the microbatch unchanged.

    The label of a document's last token gets the weight 0, because this label is the first token of
    another document.
    """
    numbers = windows.documents(microbatch.samples)
    if not numbers.any():
        return microbatch
    counts = (numbers[:, 1:] == numbers[:, :-1]).astype(np.float32)
    if microbatch.weights is not None:
        counts *= microbatch.weights
    documents: np.ndarray | None = numbers[:, :-1]
    if not numbers[:, :-1].any():
        documents = None
    return microbatch._replace(documents=documents, weights=counts)


class FormedBatches:
    """Training batches whose microbatches are changed by the function `form`, for example to make
    masked samples from windows. `form` runs in the thread that reads the microbatches."""

    def __init__(self, batches: Steps, form: Callable[[MicrobatchRows], MicrobatchRows]) -> None:
        self._batches = batches
        self._form = form

    def step(self, k: int) -> list[MicrobatchRows]:
        """Return the results of `form` for the microbatches of step k."""
        return [self._form(microbatch) for microbatch in self._batches.step(k)]
