"""Microbatches for training and validation, and a thread that reads microbatches before a step
needs them."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice, repeat
from typing import NamedTuple, Protocol

import numpy as np

from ptdmpi.config import InputError
from ptdmpi.data.order import SampleOrder
from ptdmpi.data.shards import Dataset, gather

# The number of samples whose positions are computed by one call of numpy. The number is large
# enough to make the overhead of the call negligible.
_WINDOW_SAMPLES = 1 << 14
# If steps have few samples, the samples of several steps are read together, but at most this number
# of samples.
_BLOCK_SAMPLES = 64


class MicrobatchRows(NamedTuple):
    """A microbatch as it is read from shards: b rows of s tokens, in arrays on the host.

    `ptdmpi.inference.tensors` converts these rows to a `Microbatch`, which a model uses. The fields
    of both classes have the same names. `inputs` and `labels` are two views of one int64 [b, s + 1]
    array. Neither view is contiguous, so use numpy's `reshape`, not `view`. The samples of a masked
    language model (`ptdmpi.data.masked`) have k labels each, at the positions `masked`: `labels`
    and `weights` are then [b, k].
    """

    inputs: np.ndarray  # int64 [b, s].
    labels: np.ndarray  # int64 [b, s]: the inputs shifted by one token.
    # float32 [b, s]: the weight of each label in the loss, 0 or 1 (in the user's own datasets 0, or
    # a number from `own.LEAST_WEIGHT` to `own.MOST_WEIGHT`); None: all weights are 1
    weights: np.ndarray | None
    # int64 [b]: in training, the global numbers of the samples; in validation, the numbers of the
    # samples in their dataset
    samples: np.ndarray
    # int64 [b, s]: the number of each token's document; None: one document per row
    documents: np.ndarray | None = None
    masked: np.ndarray | None = None  # int64 [b, k]: positions of the labels.
    types: np.ndarray | None = None  # int64 [b, s]: segment 0 or 1.
    # int64 [b]: 0 if the two segments are in order, 1 if they are swapped, -1 if the sample has
    # only one segment, or only fills up a validation batch
    order: np.ndarray | None = None
    # float32 [b, s]: log-probabilities of the labels under a reference model, for pairs of answers
    references: np.ndarray | None = None
    # the most probable tokens of a teacher model for each label: ids int64 [b, s, K], and
    # log-probabilities float32 [b, s, K]
    teacher: tuple[np.ndarray, np.ndarray] | None = None


class _Window(NamedTuple):
    """The samples that one rank reads in a group of consecutive steps, with the position of each
    sample in its dataset.
    """

    number: int
    ids: np.ndarray  # int64 [n]: numbers of global samples.
    places: list[list[int]]  # [3][n]: dataset, shard in the dataset, first token in the shard


class _Block(NamedTuple):
    """The microbatches of several consecutive steps, which were read together."""

    steps: range
    microbatches: list[MicrobatchRows]


class TrainBatches:
    """The training microbatches of one data rank.

    With B = `global_size`, b = `micro_size`, d = `data_size` and m = B / (d b): step k (from 0)
    trains on global samples k*B to (k+1)*B - 1. If `order` starts at a later step of the run, the
    steps k and the samples in this formula are counted from the start of `order`. Microbatch j of a
    step contains the samples j*b to (j+1)*b - 1 of the step, and data rank r has the contiguous
    block of microbatches r*m to (r+1)*m - 1. The samples of a step, and their order, therefore do
    not depend on the layout (data-parallel size d, tensor-parallel size t, pipeline-parallel size
    p).
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        order: SampleOrder,
        seq_length: int,
        *,
        global_size: int,
        micro_size: int,
        data_rank: int,
        data_size: int,
    ):
        """Raise ValueError if `global_size` is not a multiple of `micro_size` * `data_size`."""
        if global_size % (micro_size * data_size):
            raise ValueError(
                f"global batch {global_size} is not a multiple of {micro_size} * {data_size}"
            )
        self._datasets = datasets
        self._order = order
        self._seq_length = seq_length
        self._global_size = global_size
        self._micro_size = micro_size
        self._rank_size = global_size // data_size
        self._count = self._rank_size // micro_size  # microbatches per step
        self._rank_start = data_rank * self._rank_size
        self._window_steps = max(1, _WINDOW_SAMPLES // self._rank_size)
        self._window: _Window | None = None
        self._block = _Block(range(0), [])

    def _locate(self, window: int) -> _Window:
        """Return the positions of this rank's samples in window number `window`, a group of
        consecutive steps. The result of the previous call is cached.
        """
        if self._window is None or self._window.number != window:
            steps = np.arange(window * self._window_steps, (window + 1) * self._window_steps)
            firsts = self._order.start.sample + steps[:, None] * self._global_size
            firsts += self._rank_start
            ids = (firsts + np.arange(self._rank_size)).reshape(-1)
            numbers, samples = self._order.locate(ids)
            places = np.empty((2, ids.size), np.int64)
            for number, dataset in enumerate(self._datasets):
                chosen = np.flatnonzero(numbers == number)
                places[:, chosen] = dataset.places(samples[chosen], self._seq_length)
            self._window = _Window(window, ids, [numbers.tolist(), *places.tolist()])
        return self._window

    def _read(self, first: int, steps: int) -> _Block:
        """Read the microbatches of at most `steps` consecutive steps, beginning with step `first`.
        Steps are grouped into windows (`_locate`); only steps in the same window as `first` are
        read."""
        number, place = divmod(first - self._order.start.step, self._window_steps)
        window = self._locate(number)
        steps = min(steps, self._window_steps - place)
        part = slice(place * self._rank_size, (place + steps) * self._rank_size)
        places = zip(*(column[part] for column in window.places), strict=True)
        rows = gather(self._datasets, list(places), self._seq_length + 1)
        # iterating over a numpy array is the fastest method to make many views
        ids = window.ids[part].reshape(-1, self._micro_size)
        rows = rows.reshape(*ids.shape, -1)  # [microbatches, b, s + 1]
        parts = map(MicrobatchRows, rows[..., :-1], rows[..., 1:], repeat(None), ids)
        return _Block(range(first, first + steps), list(parts))

    def step(self, k: int) -> list[MicrobatchRows]:
        """Return this rank's m microbatches of step k. Raise InputError for a token id outside the
        vocabulary.

        If a step has few samples, and the steps are requested in ascending order, the samples of
        several steps are read together.
        """
        block = self._block
        if k not in block.steps:
            steps = 1
            # steps are requested in ascending order, so read several steps at a time
            if k == block.steps.stop:
                steps = max(1, _BLOCK_SAMPLES // self._rank_size)
            try:
                block = self._read(k, steps)
            except InputError:  # the illegal token may belong to a later step, so read step k alone
                block = self._read(k, 1)
            self._block = block
        first = (k - block.steps.start) * self._count
        return block.microbatches[first : first + self._count]


class ValidationBatches:
    """The validation microbatches of one data rank. The first samples of a dataset are divided
    among the data ranks, in the order of the dataset.

    Each data rank gets a contiguous block of microbatches, as in training. Every rank has the same
    number of microbatches (`count`): rows after the dataset's last sample repeat the last sample,
    with weights of 0. `samples` is the number of samples with weights of 1, over all data ranks.
    """

    def __init__(
        self,
        dataset: Dataset,
        seq_length: int,
        *,
        micro_size: int,
        data_rank: int,
        data_size: int,
        max_samples: int | None = None,
    ):
        """Prepare the microbatches of at most `max_samples` samples (None: all samples). Raise
        InputError if the dataset is shorter than one sequence."""
        self.samples = dataset.samples(seq_length)
        if max_samples is not None:
            self.samples = min(self.samples, max_samples)
        # the number of microbatches of each data rank
        self.count = -(-self.samples // (micro_size * data_size))
        self._dataset = dataset
        self._seq_length = seq_length
        self._micro_size = micro_size
        self._first = data_rank * self.count

    def microbatches(self) -> Iterator[MicrobatchRows]:
        """Yield this rank's microbatches, which are read one at a time. A microbatch has weights
        only if it contains copies of the last sample (see the class)."""
        for number in range(self._first, self._first + self.count):
            ids = np.arange(number * self._micro_size, (number + 1) * self._micro_size)
            # all ranks need the same number of microbatches, because they call the same collectives
            # for each microbatch
            rows = self._dataset.read(np.minimum(ids, self.samples - 1), self._seq_length)
            weights = None
            if ids[-1] >= self.samples:
                weights = np.zeros((self._micro_size, self._seq_length), dtype=np.float32)
                weights[ids < self.samples] = 1.0
            yield MicrobatchRows(rows[:, :-1], rows[:, 1:], weights, ids)


class Steps(Protocol):
    """A source of the microbatches of each step."""

    def step(self, k: int) -> list[MicrobatchRows]:
        """Return the microbatches of step k (from 0)."""
        ...


class Prefetcher:
    """An iterator over the microbatches of steps first_step to last_step - 1, which a thread reads
    in advance.

    The prefetcher uses a thread, not a process, because forked and spawned processes do not work
    together with MPI. At most `depth` steps are ready or being read. If reading a step fails, the
    call of next() for this step raises the exception, with its traceback.
    """

    def __init__(self, batches: Steps, first_step: int, last_step: int, depth: int = 2):
        self._batches = batches
        self._steps = iter(range(first_step, last_step))
        # The executor has one worker thread, so that steps are read in order. Because steps are
        # read in order, `TrainBatches` need only cache the block of steps that it read last.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: deque[Future[list[MicrobatchRows]]] = deque()
        for _ in range(depth):
            self._submit()

    def _submit(self) -> None:
        for step in islice(self._steps, 1):
            self._ahead.append(self._thread.submit(self._batches.step, step))

    def __iter__(self) -> Iterator[list[MicrobatchRows]]:
        return self

    def __next__(self) -> list[MicrobatchRows]:
        """Return the microbatches of the next step. Raise StopIteration after the last step."""
        if not self._ahead:
            self.close()
            raise StopIteration
        try:
            microbatches = self._ahead.popleft().result()
        except BaseException:
            self.close()
            raise
        self._submit()
        return microbatches

    def mistake(self) -> Exception | None:
        """Return the error with which the next step could not be read, if the thread has tried to
        read it and the cause is the data or a disk. Otherwise return None."""
        ready = bool(self._ahead) and self._ahead[0].done()
        error = self._ahead[0].exception() if ready else None
        return error if isinstance(error, InputError | OSError) else None

    def close(self) -> None:
        """End the iteration, and the thread that reads in advance. `close` may be called more than
        once."""
        self._steps = iter(())
        self._ahead.clear()
        self._thread.shutdown(cancel_futures=True)
