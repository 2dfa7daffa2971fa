"""Encoded blocks to shards: where a shard ends, what is held out, how far a group has come."""

from typing import Self

import numpy as np

from data_prep.encode import Encoded
from data_prep.state import CorpusCounters, GroupProgress, RunState
from data_prep.vocabulary import Vocabulary
from ptdmpi.data.shard_writer import ShardWriter


class GroupWriter:
    """Writes the encoded tasks of one group to shards, in order, and keeps its progress on disk.

    A shard (with its held-out twin) ends at the first document end at which both together have
    `shard_tokens` tokens, or inside a document that would double that.
    """

    def __init__(self, state: RunState, group: int, vocabulary: Vocabulary, shard_tokens: int):
        self._state = state
        self._group = group
        self._vocabulary = vocabulary
        self._shard_tokens = shard_tokens
        self._progress = state.load(group)
        self._held_out = self._progress.held_out  # of the document that goes on in the next task
        self._counters = self._progress.counters  # of all tasks before the present one
        self._writers: list[ShardWriter | None] = [None for _ in state.outputs]
        self._tokens = 0  # in the shards being written

    def add(self, encoded: Encoded) -> None:
        """Write a task's tokens, but those that finished shards have."""
        # A document's later segments are on the side of its first one, perhaps of a task before.
        first = np.maximum.accumulate(np.where(encoded.begins, np.arange(encoded.begins.size), -1))
        sides = np.where(first < 0, self._held_out, encoded.held_out[first])
        # bool [tokens]; None: all are on one side
        split = sides.any() and not sides.all()
        mixed = np.repeat(sides, encoded.lengths) if split else None
        ends = np.cumsum(encoded.lengths)[encoded.ended]  # int64 [documents that end here]
        position = self._progress.token if encoded.index == self._progress.task else 0
        while position < encoded.tokens.size:
            soft = position + max(1, self._shard_tokens - self._tokens)
            after = np.searchsorted(ends, soft)
            cut = position + 2 * self._shard_tokens - self._tokens
            if after < ends.size:
                cut = min(cut, int(ends[after]))
            full = cut <= encoded.tokens.size
            stop = min(cut, encoded.tokens.size)
            inside = ends[(ends > position) & (ends <= stop)]
            if full and not (inside.size and inside[-1] == stop):
                inside = np.append(inside, stop)  # the shard ends inside a document
            tokens, inside = encoded.tokens[position:stop], inside - position
            if mixed is None:
                self._write(int(sides[0]), tokens, inside)
            else:
                self._deal(tokens, mixed[position:stop], inside)
            self._tokens += tokens.size
            position = stop
            if full:
                self._close(encoded.index, position)
        if sides.size:
            self._held_out = bool(sides[-1])
        self._counters += encoded.counters

    def _deal(self, tokens: np.ndarray, held_out: np.ndarray, ends: np.ndarray) -> None:
        """`ends` counts from the first of `tokens`; a document lies wholly on one side."""
        for side in range(len(self._writers)):
            chosen = held_out if side else ~held_out
            if chosen.any():
                counts = np.cumsum(chosen)
                self._write(side, tokens[chosen], counts[ends[chosen[ends - 1]] - 1])

    def _write(self, side: int, tokens: np.ndarray, ends: np.ndarray) -> None:
        writer = self._writers[side] = self._writers[side] or self._open(side)
        writer.write(tokens, ends)

    def _open(self, side: int) -> ShardWriter:
        vocabulary = self._vocabulary
        name = f"shard-{self._group:05d}-{self._progress.shards:05d}.h5"
        return ShardWriter(
            self._state.outputs[side] / name,
            tokenizer=vocabulary.name,
            tokenizer_sha256=vocabulary.sha256,
            vocab_size=vocabulary.vocab_size,
            eod_id=vocabulary.eod_id,
        )

    def _close(self, task: int, token: int, complete: bool = False) -> None:
        """Finish the shards being written, then say so on disk: a kill in between repeats them."""
        tokens = [0, 0]
        for side, writer in enumerate(self._writers):
            if writer is not None:
                writer.close()
                tokens[side] = writer.tokens
                self._writers[side] = None
        self._counters += CorpusCounters(train_tokens=tokens[0], valid_tokens=tokens[1])
        self._tokens = 0
        shards = self._progress.shards + 1
        self._progress = GroupProgress(
            shards, task, token, self._held_out, self._counters, complete
        )
        self._state.save(self._group, self._progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The group has no more tasks: finish it; after an exception, remove what is
        half-written."""
        try:
            if kind is None:
                self._close(0, 0, complete=True)
        finally:
            for writer in self._writers:
                if writer is not None:
                    writer.discard()
