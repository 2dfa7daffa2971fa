"""Datasets of the user: a class that the user has written makes the samples.

The path of a dataset, "module:class", names the user's class. ptdmpi makes an object of this class,
with the sequence length s as argument. The object has `vocab_size`, a length, and a method
`sample(number)`, which returns s + 1 token ids, or the ids and the weight of each of the s labels.
`sample` must be a pure function. The order of samples, the mixture with other datasets and the
epochs follow the same rules as for shards.
"""

import hashlib
from collections.abc import Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from ptdmpi.base.errors import InputError
from ptdmpi.base.plugins import is_plugin, plugin, users_code
from ptdmpi.data.batches import MicrobatchRows
from ptdmpi.data.order import SampleOrder

# A weight is 0 or in this range. The gradients of a step are divided by the sum of its weights, and
# the reciprocal of a much smaller sum would overflow float32.
LEAST_WEIGHT, MOST_WEIGHT = 1e-12, 1e12


def is_own(path: str) -> bool:
    """Return True if the path of a dataset names a class of the user's own. Return False if a file
    or a directory with this path exists."""
    return not Path(path).exists() and is_plugin("datasets", path)


class OwnDataset:
    """A dataset of the user's own, with the properties that a run needs to read and identify a
    dataset."""

    def __init__(self, path: str, seq_length: int) -> None:
        """Make the user's object for sequences of `seq_length` tokens. Raise InputError if the
        user's class tries to end the program, for example by `sys.exit`. Also raise InputError if
        the object's `vocab_size` is not an integer above 0, or if the object has no length, no
        samples or no method `sample`. The first and the last sample are read, so the errors of
        `row` are also raised."""
        self.path = path
        self.seq_length = seq_length
        with users_code(path):
            self._own = plugin("datasets", path)(seq_length)
        vocab_size = getattr(self._own, "vocab_size", None)
        if not isinstance(vocab_size, Integral) or vocab_size < 1:
            raise InputError(f"{path}: vocab_size is {vocab_size!r}; legal: an integer from 1")
        self.vocab_size = int(vocab_size)
        if not callable(getattr(self._own, "sample", None)):
            raise InputError(f"{path} has no method `sample`; legal: sample(number) -> token ids")
        try:
            with users_code(path):
                length = len(self._own)
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{path}: its length is not a number of samples: {error}") from error
        if not length:
            raise InputError(f"{path} has no samples")
        self.tokenizer = str(getattr(self._own, "tokenizer", path))
        self.tokenizer_sha256 = _hash(self.tokenizer, self.vocab_size)
        # Reading all samples would take too long, so the hash covers only the number of samples,
        # the sequence length, and the first and the last sample. A change of any other sample does
        # not change the hash.
        ends = [self.row(number)[0].tolist() for number in (0, len(self._own) - 1)]
        self.sha256 = _hash(path, len(self._own), seq_length, ends)

    def samples(self, length: int) -> int:
        """Return the number of samples. `length` has no effect here: it is an argument because
        `Dataset.samples` has it."""
        return len(self._own)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the ids [s + 1] of sample `number`, and the weights [s] of its labels (None: all
        weights are 1). Raise InputError if the method `sample` tries to end the program, for
        example by `sys.exit`. Also raise InputError if ids or weights have other sizes, if an id is
        not an integer or is outside the vocabulary, or if a weight is neither 0 nor in the legal
        range."""
        try:
            with users_code(f"{self.path}: sample {number}"):
                sample: Any = self._own.sample(int(number))
        except OSError as error:
            raise InputError(f"{self.path}: sample {number}: {error}") from error
        ids, weights = sample if isinstance(sample, tuple) and len(sample) == 2 else (sample, None)
        ids = self._array(ids, "ids", number)
        if ids.shape != (self.seq_length + 1,):
            raise InputError(
                f"{self.path}: sample {number} has ids of shape {list(ids.shape)}; legal: "
                f"[{self.seq_length + 1}], one more than model.seq_length"
            )
        if ids.dtype.kind not in "biu":
            raise InputError(f"{self.path}: sample {number} has ids of {ids.dtype}, not integers")
        ids = ids.astype(np.int64)
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise InputError(
                f"{self.path}: sample {number} has token ids from {ids.min()} to {ids.max()}; "
                f"legal: 0 to {self.vocab_size - 1}"
            )
        if weights is None:
            return ids, None
        weights = self._array(weights, "weights", number)
        if weights.shape != (self.seq_length,):
            raise InputError(
                f"{self.path}: sample {number} has weights of shape {list(weights.shape)}; legal: "
                f"[{self.seq_length}]"
            )
        if weights.dtype.kind not in "biuf" or not np.isfinite(weights).all():
            raise InputError(f"{self.path}: sample {number} has weights that are not finite")
        wrong = weights[(weights != 0) & ((weights < LEAST_WEIGHT) | (weights > MOST_WEIGHT))]
        if wrong.size:
            raise InputError(
                f"{self.path}: sample {number} has a weight of {wrong[0]:g}; legal: 0, or "
                f"{LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"
            )
        return ids, weights.astype(np.float32)

    def _array(self, values: Any, name: str, number: int) -> np.ndarray:
        """Return `values`, the ids or weights of sample `number`, as an array. If the values cannot
        be converted to an array, raise InputError with a message that contains `name`."""
        try:
            return np.asarray(values)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise InputError(f"{self.path}: sample {number}: {name}: {error}") from error


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


Row = tuple[np.ndarray, np.ndarray | None]


def microbatch(rows: Sequence[Row], numbers: np.ndarray) -> MicrobatchRows:
    """Return the samples `rows` as one microbatch. `numbers` [b] are the global numbers of the
    samples."""
    ids = np.stack([ids for ids, _ in rows])
    weights = None
    if any(given is not None for _, given in rows):
        ones = np.ones(ids.shape[1] - 1, dtype=np.float32)
        weights = np.stack([ones if given is None else given for _, given in rows])
    return MicrobatchRows(ids[:, :-1], ids[:, 1:], weights, numbers)


class OwnBatches:
    """The training microbatches of one data rank, with the same sample numbers as `TrainBatches`.
    With the global batch size B, step k has the global samples k B to (k + 1) B - 1. These samples
    are divided into contiguous blocks of equal size, one for each data rank, in the order of the
    ranks."""

    def __init__(
        self,
        datasets: Sequence[OwnDataset],
        order: SampleOrder,
        *,
        global_size: int,
        micro_size: int,
        data_rank: int,
        data_size: int,
    ) -> None:
        self._datasets = datasets
        self._order = order
        self._global_size = global_size
        self._micro_size = micro_size
        self._each = global_size // data_size
        self._begin = data_rank * self._each

    def step(self, k: int) -> list[MicrobatchRows]:
        """Return this rank's microbatches of step k (from 0)."""
        start = self._order.start
        first = start.sample + (k - start.step) * self._global_size + self._begin
        numbers = np.arange(first, first + self._each)
        places = zip(*(column.tolist() for column in self._order.locate(numbers)), strict=True)
        rows = [self._datasets[dataset].row(sample) for dataset, sample in places]
        return [
            microbatch(rows[at : at + self._micro_size], numbers[at : at + self._micro_size])
            for at in range(0, self._each, self._micro_size)
        ]


def in_order(
    dataset: OwnDataset, most: int | None, *, micro_size: int, data_rank: int, data_size: int
) -> Iterator[MicrobatchRows]:
    """Yield this data rank's microbatches of the first `most` samples (None: all), for validation.

    Every data rank has the same number of microbatches: rows after the last sample repeat this
    sample, with weights of 0.
    """
    samples = dataset.samples(dataset.seq_length)
    if most is not None:
        samples = min(samples, most)
    count = -(-samples // (micro_size * data_size))
    for number in range(data_rank * count, (data_rank + 1) * count):
        numbers = np.arange(number * micro_size, (number + 1) * micro_size)
        rows = [dataset.row(sample) for sample in np.minimum(numbers, samples - 1)]
        yield microbatch(
            [_counted(row, bool(n < samples)) for row, n in zip(rows, numbers, strict=True)],
            numbers,
        )


def _counted(row: Row, counts: bool) -> Row:
    """If `counts` is True, return the row unchanged. If `counts` is False, return the row with
    weights of 0 for all labels."""
    if counts:
        return row
    return row[0], np.zeros(len(row[0]) - 1, dtype=np.float32)
