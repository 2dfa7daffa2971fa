"""Files of text as a corpus: found, grouped, read as tasks, encoded by processes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.corpus import OutputOptions, Work
from data_prep.encode import Encoded, EncodeOptions, encode_in_order
from data_prep.sources import (
    Task,
    find_sources,
    group_sources,
    read_tasks,
    size_on_disk,
    split_sources,
)
from data_prep.state import files_identity
from data_prep.vocabulary import BYTES, load_tokenizer

_TEXT_BYTES_PER_TOKEN = 4  # a usual rate of large vocabularies: makes a group about one shard
_BYTES_PER_WORKER = 1 << 21  # starting a process for less costs more than it saves


@dataclass(frozen=True)
class TextOptions:
    """What is read by `ptdmpi-data tokenize`, and how."""

    inputs: tuple[str, ...]
    encode: EncodeOptions
    suffixes: tuple[str, ...] = ()
    workers: int | None = None  # None: one per core this process may use; one under MPI


class TextCorpus:
    """Files of text under a tokenizer. Raises InputError for options or files that are bad."""

    counted = ("documents", "empty_documents", "text_bytes", "train_tokens", "valid_tokens")

    def __init__(self, options: TextOptions, output: OutputOptions):
        self._options = options
        name = options.encode.tokenizer
        self.vocabulary = load_tokenizer(name)
        self.tokenizer_file = None if name == BYTES else Path(name)
        sources = find_sources(options.inputs, options.suffixes)
        self._files = files_identity(
            (source.name, source.size_bytes, source.modified_ns) for source in sources
        )
        group_bytes = output.shard_tokens * _TEXT_BYTES_PER_TOKEN
        self._groups = group_sources(split_sources(sources, group_bytes), group_bytes)
        self.group_bytes = [sum(map(size_on_disk, group)) for group in self._groups]

    def identity(self) -> dict[str, Any]:
        return {
            "tokenizer": self.vocabulary.name,
            "tokenizer_sha256": self.vocabulary.sha256,
            "text_field": self._options.encode.text_field,
            "errors": self._options.encode.errors,
            **self._files,
        }

    def _tasks(self, work: Work) -> Iterator[Task]:
        for group in work.groups:
            first = work.first_block(group)
            for task in read_tasks(group, self._groups[group], work.advance):
                if task.index >= first:
                    yield task

    def encoded(self, work: Work) -> Iterator[Encoded]:
        size_bytes = sum(self.group_bytes[group] for group in work.groups)
        workers = self._options.workers
        if workers is None:
            workers = max(1, min(work.cores, size_bytes // _BYTES_PER_WORKER))
        return encode_in_order(self._tasks(work), self._options.encode, workers)
