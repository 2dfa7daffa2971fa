"""Text files to token shards: the orders are deterministic, the work is shared, a restart goes on.

Files form groups, groups are dealt to ranks, tasks of a group to worker processes; tokens are
written in the order of the input by one writer per shard. A shard (with its held-out twin) ends at
the first document end at which both together have `shard_tokens` tokens, or inside a document that
would double that. So the bytes of every shard are a pure function of files and options, whoever did
the work.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from tqdm import tqdm

from data_prep.encode import Encoded, EncodeOptions, encode_in_order
from data_prep.launch import Ranks
from data_prep.sources import Task, find_sources, group_sources, read_tasks
from data_prep.state import Counters, Progress, RunState, corpus_identity
from data_prep.vocabulary import BYTES, Tokenizer, load_tokenizer
from ptdmpi.config import InputError
from ptdmpi.data.shard_writer import ShardWriter

_TEXT_BYTES_PER_TOKEN = 4  # a usual rate of large vocabularies: makes a group about one shard
_BYTES_PER_WORKER = 1 << 21  # starting a process for less costs more than it saves

Result = TypeVar("Result")


@dataclass(frozen=True)
class TokenizeOptions:
    """The command line of `ptdmpi-data tokenize`."""

    inputs: tuple[str, ...]
    output: Path
    encode: EncodeOptions
    suffixes: tuple[str, ...] = ()
    valid_output: Path | None = None
    shard_tokens: int = 1 << 28
    workers: int | None = None  # None: one per core this process may use; one under MPI
    force: bool = False
    quiet: bool = False

    @property
    def outputs(self) -> tuple[Path, ...]:
        return (self.output,) if self.valid_output is None else (self.output, self.valid_output)

    def identity(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """What the bytes of the shards depend on, besides the files."""
        return {
            "tokenizer": tokenizer.name,
            "tokenizer_sha256": tokenizer.sha256,
            "text_field": self.encode.text_field,
            "errors": self.encode.errors,
            "valid_fraction": self.encode.valid_fraction,
            "shard_tokens": self.shard_tokens,
        }

    def check(self) -> None:
        """Raises InputError for options that do not go together."""
        if (self.valid_output is None) != (self.encode.valid_fraction == 0):
            raise InputError("--valid-fraction above 0 and --valid-output belong together")
        if not 0 <= self.encode.valid_fraction < 1:
            raise InputError(f"--valid-fraction {self.encode.valid_fraction}: must be in [0, 1)")
        if self.valid_output is not None and self.valid_output.resolve() == self.output.resolve():
            raise InputError("--output and --valid-output must be two directories")


class GroupWriter:
    """Writes the encoded tasks of one group to shards, in order, and keeps its progress on disk."""

    def __init__(self, state: RunState, group: int, tokenizer: Tokenizer, shard_tokens: int):
        self._state = state
        self._group = group
        self._tokenizer = tokenizer
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
        held_out = np.repeat(sides, encoded.lengths)  # bool [tokens]
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
            self._write(encoded.tokens[position:stop], held_out[position:stop], inside - position)
            position = stop
            if full:
                self._close(encoded.index, position)
        if sides.size:
            self._held_out = bool(sides[-1])
        self._counters += Counters(encoded.documents, encoded.empty, encoded.text_bytes)

    def _write(self, tokens: np.ndarray, held_out: np.ndarray, ends: np.ndarray) -> None:
        """`ends` counts from the first of `tokens`; a document lies wholly on one side."""
        self._tokens += tokens.size
        for side in range(len(self._writers)):
            chosen = held_out if side else ~held_out
            if not chosen.any():
                continue
            counts = np.cumsum(chosen)
            writer = self._writers[side] = self._writers[side] or self._open(side)
            writer.write(tokens[chosen], counts[ends[chosen[ends - 1]] - 1])

    def _open(self, side: int) -> ShardWriter:
        tokenizer = self._tokenizer
        name = f"shard-{self._group:05d}-{self._progress.shards:05d}.h5"
        return ShardWriter(
            self._state.outputs[side] / name,
            tokenizer=tokenizer.name,
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
        )

    def _close(self, task: int, token: int, complete: bool = False) -> None:
        """Finish the shards being written, then say so on disk: a kill in between repeats them."""
        tokens = [0, 0]
        for side, writer in enumerate(self._writers):
            if writer is not None:
                writer.close()
                tokens[side] = writer.tokens
                self._writers[side] = None
        self._counters += Counters(train_tokens=tokens[0], valid_tokens=tokens[1])
        self._tokens = 0
        shards = self._progress.shards + 1
        self._progress = Progress(shards, task, token, self._held_out, self._counters, complete)
        self._state.save(self._group, self._progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The group has no more tasks: finish it; after an exception, remove what is
        half-written."""
        if kind is None:
            self._close(0, 0, complete=True)
        for writer in self._writers:
            if writer is not None:
                writer.discard()


class _Stopped(InputError):
    """This rank stops because another one failed."""


class _Run:
    """One rank's part of a tokenization."""

    def __init__(self, options: TokenizeOptions, ranks: Ranks):
        options.check()
        self._options = options
        self._ranks = ranks
        self._tokenizer = load_tokenizer(options.encode.tokenizer)
        sources = find_sources(options.inputs, options.suffixes)
        self._groups = group_sources(sources, options.shard_tokens * _TEXT_BYTES_PER_TOKEN)
        self.state = RunState(
            options.outputs, corpus_identity(sources, options.identity(self._tokenizer))
        )

    def begin(self) -> Counters | None:
        """Rank 0 prepares the outputs. Returns the sums if everything is done already."""
        return self.state.begin(self._options.force) if self._ranks.rank == 0 else None

    def _workers(self, size_bytes: int) -> int:
        if self._options.workers is not None:
            return self._options.workers
        cores = len(os.sched_getaffinity(0)) if self._ranks.size == 1 else 1
        return max(1, min(cores, size_bytes // _BYTES_PER_WORKER))

    def _tasks(self, groups: Sequence[int], bar: tqdm) -> Iterator[Task]:
        for group in groups:
            first = self.state.load(group).task
            for task in read_tasks(group, self._groups[group], bar.update):
                if self._ranks.size > 1 and self.state.someone_failed():
                    raise _Stopped("another rank failed")
                if task.index >= first:
                    yield task

    def _writer(self, group: int) -> GroupWriter:
        return GroupWriter(self.state, group, self._tokenizer, self._options.shard_tokens)

    def _write_groups(self, groups: Sequence[int], bar: tqdm, workers: int) -> None:
        encoded = encode_in_order(self._tasks(groups, bar), self._options.encode, workers)
        with closing(encoded):
            for group, tasks in groupby(encoded, key=lambda task: task.group):
                with self._writer(group) as writer:
                    for task in tasks:
                        writer.add(task)
        for group in groups:
            if not self.state.load(group).complete:  # its files are all empty
                with self._writer(group):
                    pass

    def work(self) -> None:
        """Tokenize the groups of this rank that are not complete."""
        mine = range(self._ranks.rank, len(self._groups), self._ranks.size)
        groups = [group for group in mine if not self.state.load(group).complete]
        size_bytes = sum(source.size_bytes for group in groups for source in self._groups[group])
        hidden = (
            True if self._options.quiet or self._ranks.rank else None
        )  # None: shown on a terminal
        try:
            with tqdm(total=size_bytes, unit="B", unit_scale=True, disable=hidden) as bar:
                self._write_groups(groups, bar, self._workers(size_bytes))
        except Exception:
            self.state.mark_failed()
            raise

    def finish(self) -> Counters | None:
        """Rank 0 completes the outputs, with a copy of the tokenizer for those who decode."""
        if self._ranks.rank:
            return None
        name = self._options.encode.tokenizer
        return self.state.finish(len(self._groups), None if name == BYTES else Path(name))


def _together(ranks: Ranks, action: Callable[[], Result]) -> Result:
    """The result of an action that all ranks do; where one fails, all raise (the first) failure."""
    try:
        result = action()
    except Exception as error:
        failures = ranks.allgather(None if isinstance(error, _Stopped) else str(error))
        if isinstance(error, InputError):
            raise InputError(next(text for text in failures if text is not None)) from error
        raise
    failures = [text for text in ranks.allgather(None) if text is not None]
    if failures:
        raise InputError(failures[0])
    return result


def tokenize(options: TokenizeOptions, ranks: Ranks) -> dict[str, int | float]:
    """Make token shards of text files; the final table: sums over documents, seconds, tokens_per_s.

    All ranks call it. Raises InputError for bad options or input, an output directory that holds
    something else, a full disk; then no half-written shard is left, and no directory without a
    finished one.
    """
    started = time.perf_counter()
    run = _together(ranks, lambda: _Run(options, ranks))
    done = ranks.allgather(_together(ranks, run.begin))[0]
    if done is None:
        try:
            _together(ranks, run.work)
            done = ranks.allgather(_together(ranks, run.finish))[0]
        except BaseException:
            if ranks.rank == 0:
                run.state.clean()
            raise
    seconds = time.perf_counter() - started
    tokens = done.train_tokens + done.valid_tokens
    return {
        **asdict(done),
        "bytes_per_token": done.text_bytes / tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
    }
