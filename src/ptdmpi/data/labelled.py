"""Samples of tasks: a sequence with its class, or several candidate sequences and the number of the
right candidate.

The candidates of one question (Devlin et al. 2019, section 4.4; RACE) are neighbouring rows of a
microbatch. As for shards, the order of samples is a pure function of (seed, global sample number).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ptdmpi.data.batches import MicrobatchRows
from ptdmpi.data.order import SampleOrder


@dataclass(frozen=True)
class LabelledRow:
    """One sequence of a sample: its token ids (int [n], no padding), and the position at which its
    second text begins (n if the sequence has only one text)."""

    ids: np.ndarray
    second: int


@dataclass(frozen=True)
class LabelledFile:
    """A file of samples, converted to tokens.

    Each sample has `sequences` neighbouring entries of `rows` and one number in `labels` (int
    [samples]). `sha256` is the hash of the file, and `tokenizer_sha256` is the hash of the
    tokenizer. `cut` is the number of rows that were shortened, because they were too long for a
    sequence. `lost` is the total number of tokens that were cut off.
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
        """Return the number of samples. `length` has no effect here: it is an argument because
        `Dataset.samples` has it."""
        return len(self.labels)


@dataclass(frozen=True)
class LabelledForm:
    """The format of the samples that a model reads: rows of `seq_length` ids, padded with the id
    `pad`. If `first` is True, the model's head reads the activation at the first token, as in a
    model with bidirectional attention. If `first` is False, the head reads the activation at the
    last token of each sequence. With causal attention, this activation does not depend on padding.
    `last_type` is the token type of the second text.
    """

    seq_length: int
    pad: int
    first: bool
    last_type: int

    def microbatch(
        self, samples: Sequence[tuple[LabelledFile, int]], ids: np.ndarray, counts: np.ndarray
    ) -> MicrobatchRows:
        """Return a microbatch of n samples, which are n * `sequences` rows.

        `samples` names each sample by its file and its number in the file. `ids` (int [n]) has the
        global numbers of the samples. `counts` (float [n]) is 1 if a sample contributes to the
        loss, and 0 if not.
        """
        sequences = samples[0][0].sequences
        rows = [
            file.rows[sample * sequences + k] for file, sample in samples for k in range(sequences)
        ]
        inputs = np.full((len(rows), self.seq_length), self.pad, dtype=np.int64)
        types = np.zeros_like(inputs)
        padding = np.ones_like(inputs)
        positions = np.zeros((len(rows), 1), dtype=np.int64)
        for number, row in enumerate(rows):
            inputs[number, : len(row.ids)] = row.ids
            types[number, row.second : len(row.ids)] = self.last_type
            padding[number, : len(row.ids)] = 0
            if not self.first:
                positions[number] = len(row.ids) - 1
        labels = np.array([[file.labels[sample]] for file, sample in samples], dtype=np.int64)
        return MicrobatchRows(
            # each sequence gets a different sample number, so that no two sequences have the same
            # dropout mask
            samples=(ids[:, None] * sequences + np.arange(sequences)).reshape(-1),
            inputs=inputs,
            labels=labels,
            weights=None if counts.all() else counts.astype(np.float32)[:, None],
            documents=padding if self.first and padding.any() else None,
            masked=positions,
            types=types,
        )


class LabelledBatches:
    """The training microbatches of one data rank for samples of tasks. As in `TrainBatches`, each
    data rank gets a contiguous block of the samples of a step.

    A step has `samples` samples, and a microbatch has `micro` samples.
    """

    def __init__(
        self,
        files: Sequence[LabelledFile],
        order: SampleOrder,
        form: LabelledForm,
        *,
        samples: int,
        micro: int,
        data_rank: int,
        data_size: int,
    ) -> None:
        self._files = files
        self._order = order
        self._form = form
        self._samples = samples
        self._micro = micro
        share = samples // data_size
        self._mine = data_rank * share + np.arange(share)

    def step(self, k: int) -> list[MicrobatchRows]:
        """Return this rank's microbatches of step k (from 0)."""
        start = self._order.start
        ids = start.sample + (k - start.step) * self._samples + self._mine
        files, places = self._order.locate(ids)
        samples = [(self._files[file], place) for file, place in zip(files, places, strict=True)]
        every = np.ones(self._micro)
        return [
            self._form.microbatch(samples[i : i + self._micro], ids[i : i + self._micro], every)
            for i in range(0, len(ids), self._micro)
        ]


def in_order(
    file: LabelledFile,
    form: LabelledForm,
    micro: int,
    *,
    data_rank: int,
    data_size: int,
    most: int | None = None,
) -> Iterator[MicrobatchRows]:
    """Yield the microbatches of data rank `data_rank` for the first `most` samples of a file (None:
    all).

    A microbatch has `micro` samples. Each rank gets a contiguous block of microbatches, and all
    ranks have the same number of microbatches. To fill the last microbatches, the last sample of
    the file is repeated with weights of 0.
    """
    samples = len(file.labels)
    if most is not None:
        samples = min(most, samples)
    count = -(-samples // (micro * data_size))
    for number in range(data_rank * count, (data_rank + 1) * count):
        ids = number * micro + np.arange(micro)
        inside = [(file, min(place, samples - 1)) for place in ids.tolist()]
        yield form.microbatch(inside, ids, (ids < samples).astype(np.float32))
