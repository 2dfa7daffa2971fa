"""Samples of tasks: a sequence with the number of its class, or several of which one is right.

Candidates of one question (Devlin et al. 2019, section 4.4; RACE) are neighbours in a microbatch.
Samples come in the order of shards: a pure function of (seed, global sample number).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ptdmpi.data.batches import Microbatch
from ptdmpi.data.order import SampleOrder


@dataclass(frozen=True)
class LabelledRow:
    """One sequence: its ids [n], without padding, and where in it the second text begins (n:
    nowhere)."""

    ids: np.ndarray
    second: int


@dataclass(frozen=True)
class LabelledFile:
    """A file of samples as tokens: `sequences` of `rows` for each, and `labels` [samples].

    `sha256` is that of its bytes, `tokenizer_sha256` that of what made them tokens; `cut` rows have
    lost `lost` tokens that a sequence had no room for.
    """

    path: Path
    tokenizer: str
    tokenizer_sha256: str
    sha256: str
    rows: Sequence[LabelledRow]
    sequences: int
    labels: np.ndarray
    cut: int
    lost: int

    def samples(self, length: int) -> int:
        """How many samples it has, of whatever length."""
        return len(self.labels)


@dataclass(frozen=True)
class LabelledForm:
    """What samples become for a model: rows of `seq_length` ids, filled up with `pad`. `first`: its
    head looks at the first token, which sees the last one; else at the last of each sequence, which
    nothing behind it changes. `last_type` is the type of the second text."""

    seq_length: int
    pad: int
    first: bool
    last_type: int

    def microbatch(
        self, samples: Sequence[tuple[LabelledFile, int]], ids: np.ndarray, counts: np.ndarray
    ) -> Microbatch:
        """Samples (a file, and the number in it) with global numbers `ids` [n], of which those with
        `counts` [n] 1 count: [n sequences, s]."""
        sequences = samples[0][0].sequences
        rows = [
            file.rows[sample * sequences + k] for file, sample in samples for k in range(sequences)
        ]
        inputs = np.full((len(rows), self.seq_length), self.pad, dtype=np.int64)
        types, padding = np.zeros_like(inputs), np.ones_like(inputs)
        asked = np.zeros((len(rows), 1), dtype=np.int64)
        for number, row in enumerate(rows):
            inputs[number, : len(row.ids)] = row.ids
            types[number, row.second : len(row.ids)] = self.last_type
            padding[number, : len(row.ids)] = 0
            asked[number] = 0 if self.first else len(row.ids) - 1
        labels = np.array([[file.labels[sample]] for file, sample in samples], dtype=np.int64)
        return Microbatch(
            # each sequence has a number of its own, so that no two drop the same
            sample_ids=(ids[:, None] * sequences + np.arange(sequences)).reshape(-1),
            inputs=inputs,
            labels=labels,
            loss_mask=None if counts.all() else counts.astype(np.float32)[:, None],
            documents=padding if self.first and padding.any() else None,
            masked=asked,
            types=types,
        )


class LabelledBatches:
    """The training microbatches of one data rank, as `TrainBatches` deals samples to ranks; of
    `samples` a step, `micro` a microbatch."""

    def __init__(
        self,
        files: Sequence[LabelledFile],
        order: SampleOrder,
        form: LabelledForm,
        samples: int,
        micro: int,
        data_rank: int,
        data_size: int,
    ) -> None:
        self._files, self._order, self._form = files, order, form
        self._samples, self._micro = samples, micro
        share = samples // data_size
        self._mine = data_rank * share + np.arange(share)

    def step(self, k: int) -> list[Microbatch]:
        """This rank's microbatches of step k."""
        start = self._order.start
        ids = start.sample + (k - start.step) * self._samples + self._mine
        files, places = self._order.locate(ids)
        found = [(self._files[file], place) for file, place in zip(files, places, strict=True)]
        every = np.ones(self._micro)
        return [
            self._form.microbatch(found[i : i + self._micro], ids[i : i + self._micro], every)
            for i in range(0, len(ids), self._micro)
        ]


def in_order(
    file: LabelledFile,
    form: LabelledForm,
    micro: int,
    data_rank: int,
    data_size: int,
    most: int | None = None,
) -> Iterator[Microbatch]:
    """The first `most` samples of a file (None: all), `micro` a microbatch, dealt to the data ranks
    in contiguous blocks; each has equally many, of which the last may count nothing."""
    samples = len(file.labels) if most is None else min(most, len(file.labels))
    count = -(-samples // (micro * data_size))
    for number in range(data_rank * count, (data_rank + 1) * count):
        ids = number * micro + np.arange(micro)
        inside = [(file, min(place, samples - 1)) for place in ids.tolist()]
        yield form.microbatch(inside, ids, (ids < samples).astype(np.float32))
