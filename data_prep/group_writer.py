"""Writing of a group to shards, and of the group's progress to a file. A group is a part of a
corpus that one rank encodes and writes. A group consists of tasks (see `sources.Task`)."""

from typing import Self

import numpy as np

from data_prep.encode import Encoded
from data_prep.state import CorpusCounters, GroupProgress, RunState
from data_prep.vocabulary import Vocabulary
from ptdmpi.data.shard_writer import ShardWriter


class GroupWriter:
    """A writer of shards for one group. It writes the encoded tasks of the group in order, and can
    continue after a restart.

    At most two shards are open at a time, one for training documents and one for held-out
    documents. When the open shards have at least `shard_tokens` tokens in total, both are finished
    at the next end of a document. A document that is too long is cut, so that the total is at most
    2 `shard_tokens`.
    """

    def __init__(self, state: RunState, group: int, vocabulary: Vocabulary, shard_tokens: int):
        self._state = state
        self._group = group
        self._vocabulary = vocabulary
        self._shard_tokens = shard_tokens
        self._progress = state.load(group)
        # True if the document that continues in the next task is held out
        self._held_out = self._progress.held_out
        self._counters = self._progress.counters  # sums over all tasks before the present task
        self._writers: list[ShardWriter | None] = [None for _ in state.outputs]
        self._tokens = 0  # number of tokens in the shards that are being written

    def add(self, encoded: Encoded) -> None:
        """Write the tokens of a task, except the tokens that are already in finished shards."""
        # A segment is a document, or the part of a document in one task (see `Encoded`). A segment
        # is held out if the first segment of its document is held out, which may be in an earlier
        # task.
        first = np.maximum.accumulate(np.where(encoded.begins, np.arange(encoded.begins.size), -1))
        sides = np.where(first < 0, self._held_out, encoded.held_out[first])
        # bool [tokens]: True for tokens that are held out; None if all tokens go to the same shard
        mixed = None
        if sides.any() and not sides.all():
            mixed = np.repeat(sides, encoded.lengths)
        # the index of the first token after each document: int64 [documents that end in this task]
        ends = np.cumsum(encoded.lengths)[encoded.ended]
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
                inside = np.append(inside, stop)  # cut a document that is too long for the shard
            tokens = encoded.tokens[position:stop]
            inside = inside - position
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
        """Write `tokens` (int [tokens]) to two shards. Tokens for which `held_out` (bool [tokens])
        is True are written to the shard of held-out documents, and all other tokens to the shard of
        training documents.

        `ends` (int [documents]) contains, for each document, the index in `tokens` of the first
        token after the document. All tokens of a document are written to the same shard.
        """
        for side, chosen in enumerate((~held_out, held_out)):
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
        """Finish the open shards, then write the progress. If the process is killed between these
        two steps, the same shards are written again after a restart.

        The next shards begin with token `token` of task `task`. If `complete` is True, the group
        has no further shards.
        """
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
            shards=shards,
            task=task,
            token=token,
            held_out=self._held_out,
            counters=self._counters,
            complete=complete,
        )
        self._state.save(self._group, self._progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Without an exception, finish the group. After an exception, remove the incomplete
        shards."""
        try:
            if kind is None:
                self._close(0, 0, complete=True)
        finally:
            for writer in self._writers:
                if writer is not None:
                    writer.discard()
