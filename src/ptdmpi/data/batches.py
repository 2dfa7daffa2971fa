"""From sample ids to microbatches, and the thread that prepares them ahead of the training step."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice, repeat
from typing import NamedTuple, Protocol

import numpy as np

from ptdmpi.config import InputError
from ptdmpi.data.order import SampleOrder
from ptdmpi.data.shards import Dataset, gather

_WINDOW_SAMPLES = (
    1 << 14
)  # samples whose places are computed at once: numpy's cost per call is spread
_BLOCK_SAMPLES = 64  # read at once where steps have fewer


class Microbatch(NamedTuple):
    """b sequences of s tokens. `inputs` and `labels` are two views of one int64 [b, s + 1] array,
    so neither is contiguous (reshape, do not view)."""

    sample_ids: (
        np.ndarray
    )  # int64 [b]: global sample indices; of validation: samples of the dataset
    inputs: np.ndarray  # int64 [b, s]
    labels: np.ndarray  # int64 [b, s]: the inputs one token further
    loss_mask: np.ndarray | None  # float32 [b, s], 0 where a token does not count; None: all count
    documents: np.ndarray | None = None  # int64 [b, s]: tells documents apart; None: one a row
    # Of masked samples, whose labels and loss_mask are [b, k]; see `masked`.
    masked: np.ndarray | None = None  # int64 [b, k]: positions of the labels
    types: np.ndarray | None = None  # int64 [b, s]: segment 0 or 1
    order: np.ndarray | None = None  # int64 [b]: 0 in order, 1 swapped, -1 one segment only


class _Window(NamedTuple):
    """Where the samples of consecutive steps are."""

    number: int
    ids: np.ndarray  # int64 [n]: global samples
    places: list[list[int]]  # [3][n]: dataset, shard of it, first token in that


class _Block(NamedTuple):
    """Consecutive steps that were read together."""

    steps: range
    microbatches: list[Microbatch]


class TrainBatches:
    """The training microbatches of one data rank.

    Step k (from 0) trains on global samples k*B to (k+1)*B - 1; of an order with a later start, k
    and the samples are counted from there. Microbatch j of a step holds samples j*b to (j+1)*b - 1
    of it, and data rank r has the contiguous block j = r*m to (r+1)*m - 1. So neither the samples
    of a step nor their order depends on d, t or p. Raises ValueError if d b does not divide B.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        order: SampleOrder,
        seq_length: int,
        global_size: int,
        micro_size: int,
        data_rank: int,
        data_size: int,
    ):
        if global_size % (micro_size * data_size):
            raise ValueError(
                f"global batch {global_size} is no multiple of {micro_size} * {data_size}"
            )
        self._datasets = datasets
        self._order = order
        self._seq_length = seq_length
        self._global_size = global_size
        self._micro_size = micro_size
        self._rank_size = global_size // data_size
        self._count = self._rank_size // micro_size  # microbatches of a step
        self._rank_start = data_rank * self._rank_size
        self._window_steps = max(1, _WINDOW_SAMPLES // self._rank_size)
        self._window: _Window | None = None
        self._block = _Block(range(0), [])

    def _locate(self, window: int) -> _Window:
        """Where the samples of some consecutive steps are: a cache of a pure function."""
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
        """Some consecutive steps of one window."""
        number, place = divmod(first - self._order.start.step, self._window_steps)
        window = self._locate(number)
        steps = min(steps, self._window_steps - place)
        part = slice(place * self._rank_size, (place + steps) * self._rank_size)
        places = zip(*(column[part] for column in window.places), strict=True)
        rows = gather(self._datasets, list(places), self._seq_length + 1)
        # views are cheapest to make by going through an array
        ids = window.ids[part].reshape(-1, self._micro_size)
        rows = rows.reshape(*ids.shape, -1)  # [microbatches, b, s + 1]
        parts = map(Microbatch, ids, rows[..., :-1], rows[..., 1:], repeat(None))
        return _Block(range(first, first + steps), list(parts))

    def step(self, k: int) -> list[Microbatch]:
        """This rank's m microbatches of step k. Raises InputError for ids outside the
        vocabulary.

        Where steps are small and asked for in their order, several are read together.
        """
        block = self._block
        if k not in block.steps:
            # ahead only where steps come in turn: after a jump nobody knows which comes next
            together = max(1, _BLOCK_SAMPLES // self._rank_size) if k == block.steps.stop else 1
            try:
                block = self._read(k, together)
            except InputError:  # of this step, or of a later one: then it has time until that one
                block = self._read(k, 1)
            self._block = block
        first = (k - block.steps.start) * self._count
        return block.microbatches[first : first + self._count]


class ValidationBatches:
    """The validation microbatches of one data rank: the first samples of a dataset, in their order.

    Microbatches are dealt to the data ranks in contiguous blocks, as in training. Every rank has
    the same number of them: rows beyond the last sample repeat it under a loss mask of zeros.
    """

    def __init__(
        self,
        dataset: Dataset,
        seq_length: int,
        micro_size: int,
        data_rank: int,
        data_size: int,
        max_samples: int | None = None,
    ):
        samples = dataset.samples(seq_length)
        self.samples = samples if max_samples is None else min(samples, max_samples)
        self.count = -(-self.samples // (micro_size * data_size))  # microbatches of each data rank
        self._dataset = dataset
        self._seq_length = seq_length
        self._micro_size = micro_size
        self._first = data_rank * self.count

    def microbatches(self) -> Iterator[Microbatch]:
        """This rank's microbatches, read one at a time. Only those with padded rows have a loss
        mask."""
        for number in range(self._first, self._first + self.count):
            ids = np.arange(number * self._micro_size, (number + 1) * self._micro_size)
            # the same number of microbatches on all ranks, or their collectives would not match
            rows = self._dataset.read(np.minimum(ids, self.samples - 1), self._seq_length)
            mask = None
            if ids[-1] >= self.samples:
                mask = np.zeros((self._micro_size, self._seq_length), dtype=np.float32)
                mask[ids < self.samples] = 1.0
            yield Microbatch(ids, rows[:, :-1], rows[:, 1:], mask)


class Steps(Protocol):
    """Anything that gives the microbatches of a step."""

    def step(self, k: int) -> list[Microbatch]: ...


class Prefetcher:
    """Iterates over the batches of steps first_step to last_step - 1, prepared ahead by a thread.

    A thread, since forked or spawned processes do not go together with MPI. At most `depth` steps
    are ready or in work. next() raises an exception of the thread with its traceback, in its step's
    turn.
    """

    def __init__(self, batches: Steps, first_step: int, last_step: int, depth: int = 2):
        self._batches = batches
        self._steps = iter(range(first_step, last_step))
        # one: steps come in turn, and `TrainBatches` keeps what it read last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: deque[Future[list[Microbatch]]] = deque()
        for _ in range(depth):
            self._submit()

    def _submit(self) -> None:
        for step in islice(self._steps, 1):
            self._ahead.append(self._thread.submit(self._batches.step, step))

    def __iter__(self) -> Iterator[list[Microbatch]]:
        return self

    def __next__(self) -> list[Microbatch]:
        """The microbatches of the next step."""
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

    def close(self) -> None:
        """End the thread; no more batches come. May be called more than once."""
        self._steps = iter(())
        self._ahead.clear()
        self._thread.shutdown(cancel_futures=True)
