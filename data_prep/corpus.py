"""Conversion of a corpus to token shards, on one or several ranks.

A corpus consists of groups of documents, and the groups are divided among the ranks. A group is
encoded in blocks, and one writer writes all blocks of the group, in order. Therefore the bytes of
each shard depend only on the input files and the options, not on the number of ranks. If the
command is stopped and started again, it continues where it was stopped.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TypeVar

from data_prep.encode import Encoded
from data_prep.group_writer import GroupWriter
from data_prep.launch import Team
from data_prep.state import CorpusCounters, RunState
from data_prep.vocabulary import Vocabulary
from ptdmpi.base.progress import progress
from ptdmpi.config import InputError

Result = TypeVar("Result")


@dataclass(frozen=True)
class OutputOptions:
    """The directories for the shards, and the options that determine how documents are divided
    among shards."""

    output: Path
    valid_output: Path | None = None
    valid_fraction: float = 0.0
    shard_tokens: int = 1 << 28
    force: bool = False

    @property
    def outputs(self) -> tuple[Path, ...]:
        """Return the directory for training shards, followed by the directory for held-out shards,
        if there is one."""
        if self.valid_output is None:
            return (self.output,)
        return (self.output, self.valid_output)

    def identity(self) -> dict[str, Any]:
        """Return the options that determine the bytes of the shards."""
        return {"valid_fraction": self.valid_fraction, "shard_tokens": self.shard_tokens}

    def check(self) -> None:
        """Raise InputError if an option is illegal or if options contradict each other."""
        if (self.valid_output is None) != (self.valid_fraction == 0):
            raise InputError("--valid-fraction above 0 and --valid-output belong together")
        if not 0 <= self.valid_fraction < 1:
            raise InputError(f"--valid-fraction {self.valid_fraction}: must be in [0, 1)")
        if self.valid_output is not None and self.valid_output.resolve() == self.output.resolve():
            raise InputError("--output and --valid-output must be two directories")


@dataclass(frozen=True)
class Work:
    """The work of a rank. `groups` are the indices of the groups that the rank encodes.
    `first_block` is a function that takes the index of a group, and returns the index of the
    group's first block that is not yet in finished shards."""

    groups: Sequence[int]
    first_block: Callable[[int], int]
    cores: int  # number of processor cores that this rank may use
    advance: Callable[[int], object]  # is called with the number of bytes read, to show progress
    rank: int = 0


class Corpus(Protocol):
    """The interface of a corpus. A corpus consists of groups of documents, and yields the documents
    of a group as a sequence of encoded blocks."""

    vocabulary: Vocabulary
    # this file is copied to the directories of the shards, so that users can decode the tokens
    tokenizer_file: Path | None
    counted: tuple[str, ...]  # the fields of CorpusCounters in the final table
    group_bytes: Sequence[int]  # size of each group on the disk, in bytes

    def identity(self) -> dict[str, Any]:
        """Return the properties of the input files, and the options, that determine the tokens of
        the shards."""

    def preparations(self, work: Work, folder: Path) -> Sequence[Callable[[], None]]:
        """Return the functions that must be called before any block of the corpus can be encoded.

        All ranks call them together, one after the other. The functions store their results in
        `folder`.
        """

    def encoded(self, work: Work) -> Iterator[Encoded]:
        """Yield the encoded blocks of the groups in `work`, in order. A corpus may leave out blocks
        before `work.first_block`, because they are already in finished shards."""


class _Stopped(InputError):
    """The error that stops this rank because another rank has failed."""


class _Run:
    """One rank's part of the conversion of a corpus, divided into steps."""

    def __init__(self, corpus: Corpus, options: OutputOptions, ranks: Team):
        self._corpus = corpus
        self._options = options
        self._ranks = ranks
        self.state = RunState(options.outputs, {**corpus.identity(), **options.identity()})

    def begin(self) -> CorpusCounters | None:
        """On rank 0, prepare the output directories. If the outputs are already complete, return
        the sums over all documents; otherwise return None. On all other ranks, do nothing and
        return None."""
        if self._ranks.rank != 0:
            return None
        return self.state.begin(self._options.force)

    def _writer(self, group: int) -> GroupWriter:
        return GroupWriter(self.state, group, self._corpus.vocabulary, self._options.shard_tokens)

    def _first_block(self, group: int) -> int:
        return self.state.load(group).task

    def _write_groups(self, work: Work) -> None:
        """Write the shards of the groups in `work`. Raise _Stopped if another rank has failed."""
        encoded = self._corpus.encoded(work)
        with closing(encoded):
            for group, blocks in groupby(encoded, key=lambda block: block.group):
                first = self._first_block(group)
                with self._writer(group) as writer:
                    for block in blocks:
                        if self._ranks.size > 1 and self.state.someone_failed():
                            raise _Stopped("another rank failed")
                        if block.index >= first:
                            writer.add(block)
        for group in work.groups:
            # a group yields no block if all its files are empty: store that such a group is
            # complete
            if not self.state.load(group).complete:
                with self._writer(group):
                    pass

    @contextmanager
    def _progress(self, what: str, groups: Sequence[int]) -> Iterator[Work]:
        """Return a context manager that yields the `Work` for `groups`. Inside the context, a
        progress bar with the title `what` is shown."""
        cores = 1
        if self._ranks.size == 1:
            cores = len(os.sched_getaffinity(0))
        total = sum(self._corpus.group_bytes[group] for group in groups)
        with progress(what, total, "B") as advance:
            yield Work(
                groups=groups,
                first_block=self._first_block,
                cores=cores,
                advance=advance,
                rank=self._ranks.rank,
            )

    def _mine(self) -> Sequence[int]:
        return range(self._ranks.rank, len(self._corpus.group_bytes), self._ranks.size)

    def prepare(self) -> None:
        """Do the preparations of the corpus, together with all other ranks."""
        with self._progress("looking for duplicates", self._mine()) as work:
            for step in self._corpus.preparations(work, self.state.folder):
                _together(self._ranks, step)

    def work(self) -> None:
        """Write the shards of this rank's groups. Groups whose shards are already complete are
        skipped."""
        groups = [group for group in self._mine() if not self.state.load(group).complete]
        try:
            with self._progress("tokenizing", groups) as work:
                self._write_groups(work)
        except Exception:
            self.state.mark_failed()
            raise

    def finish(self) -> CorpusCounters | None:
        """Complete the outputs on rank 0, and return the sums over all documents. Return None on
        other ranks."""
        if self._ranks.rank:
            return None
        return self.state.finish(len(self._corpus.group_bytes), self._corpus.tokenizer_file)


def _together(ranks: Team, action: Callable[[], Result]) -> Result:
    """Call `action` on all ranks, and return its result on this rank. If the call fails on some
    ranks, raise InputError on all ranks, with the message of the lowest rank that has failed. If
    the error is not an InputError, the rank on which it occurred raises it unchanged."""
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


def make_shards(
    open_corpus: Callable[[], Corpus], options: OutputOptions, ranks: Team
) -> dict[str, int | float]:
    """Make token shards from the corpus that `open_corpus` returns. Return the final table: sums
    over all documents, seconds, and tokens_per_s.

    All ranks must call this function. Raise InputError for bad options or input, for an output
    directory with other contents, and for a full disk. After such an error, neither incomplete
    shards nor directories without a finished shard remain.
    """
    started = time.perf_counter()

    def prepare() -> tuple[Corpus, _Run]:
        """Open the corpus. Raise InputError for bad options or files."""
        options.check()
        corpus = open_corpus()
        return corpus, _Run(corpus, options, ranks)

    corpus, run = _together(ranks, prepare)
    done = ranks.allgather(_together(ranks, run.begin))[0]
    if done is None:
        try:
            run.prepare()
            _together(ranks, run.work)
            done = ranks.allgather(_together(ranks, run.finish))[0]
        except BaseException:
            if ranks.rank == 0:
                run.state.clean()
            raise
    seconds = time.perf_counter() - started
    sums = asdict(done)
    table: dict[str, int | float] = {name: sums[name] for name in corpus.counted}
    tokens = done.train_tokens + done.valid_tokens
    if "text_bytes" in table:
        table["bytes_per_token"] = done.text_bytes / tokens
    return {**table, "seconds": seconds, "tokens_per_s": tokens / seconds}
