"""A corpus of texts, from files or from a stream. The process of a rank divides the texts into
groups and reads the texts. The worker processes of the rank encode the texts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from data_prep.corpus import OutputOptions, Work
from data_prep.duplicates import Duplicates, check
from data_prep.encode import (
    Encoded,
    EncodeOptions,
    Encoder,
    document_share,
    map_in_order,
    read_pieces,
)
from data_prep.sources import (
    Task,
    find_sources,
    group_sources,
    read_tasks,
    size_on_disk,
    split_sources,
)
from data_prep.state import files_identity
from data_prep.stream import StreamedTexts, StreamOptions
from data_prep.vocabulary import load_tokenizer, tokenizer_file
from ptdmpi.base.progress import progress
from ptdmpi.base.say import note
from ptdmpi.base.words import counted
from ptdmpi.config import InputError

# The usual number of bytes of text per token, for tokenizers with large vocabularies. With this
# ratio, a group of files gives about one shard.
_TEXT_BYTES_PER_TOKEN = 4
# if a worker process encodes fewer bytes than this, its start takes more time than its work saves
_BYTES_PER_WORKER = 1 << 21


@dataclass(frozen=True)
class TextOptions:
    """The inputs and options of `ptdmpi-data tokenize`, except the options for the output. If
    `stream` is not None, there is only one input, a data set that is read as a stream."""

    inputs: tuple[str, ...]
    encode: EncodeOptions
    suffixes: tuple[str, ...] = ()
    # number of processes; None: one per core that this process may use, or only one under MPI
    workers: int | None = None
    deduplicate: str | None = None  # EXACT or NEAR; None: duplicates are not left out
    stream: StreamOptions | None = None


class Texts(Protocol):
    """The texts of a corpus, in groups."""

    # size of each group on the disk, in bytes; 0 if it is not known before the group is read
    group_bytes: Sequence[int]

    def identity(self) -> dict[str, Any]:
        """Return the properties of the inputs that determine the texts."""

    def tasks(self, group: int, advance: Callable[[int], object]) -> Iterator[Task]:
        """Yield the tasks of a group, in order. `advance` is called with the number of bytes that
        have been read. Raise InputError if the texts cannot be read."""


class FileTexts:
    """The texts in files. Each group of files, except the last one, has at least `group_bytes`
    bytes."""

    def __init__(self, options: TextOptions, group_bytes: int):
        """Find the input files, and divide them into groups. Raise InputError for bad inputs."""
        sources = find_sources(options.inputs, options.suffixes)
        self._field = options.encode.text_field
        self._files = files_identity(
            (source.name, source.size_bytes, source.modified_ns) for source in sources
        )
        self._groups = group_sources(split_sources(sources, group_bytes), group_bytes)
        self.group_bytes = [sum(map(size_on_disk, group)) for group in self._groups]

    def identity(self) -> dict[str, Any]:
        """Return the number of files, and a hash of their names, sizes and modification times."""
        return self._files

    def tasks(self, group: int, advance: Callable[[int], object]) -> Iterator[Task]:
        """Yield the tasks of a group (see `read_tasks`)."""
        return read_tasks(group, self._groups[group], advance, self._field)


def _open(options: TextOptions, group_bytes: int) -> Texts:
    """Return the texts of the inputs in `options`. Raise InputError for bad inputs."""
    if options.stream is None:
        return FileTexts(options, group_bytes)
    if options.suffixes or len(options.inputs) != 1:
        raise InputError("--stream reads one data set, and no --suffix; make one output for each")
    return StreamedTexts(options.inputs[0], options.encode.text_field, options.stream)


def training_texts(options: TextOptions, sample_bytes: int | None) -> Iterator[str]:
    """Yield the texts on which a tokenizer is trained. If `sample_bytes` is not None, yield only a
    sample with about this number of bytes, chosen by hash. Raise InputError if there is no text.
    The errors of `read_pieces` are also raised."""
    if options.stream is not None and sample_bytes is not None:
        raise InputError("--sample-bytes needs the sizes of files; with --stream: --documents")
    texts = _open(options, 1 << 62)  # one group of all files
    total = sum(texts.group_bytes)
    share = 1.0  # fraction of the texts on which the tokenizer is trained
    if sample_bytes is not None:
        share = sample_bytes / max(1, total)
    empty = True
    bad: list[int] = []
    with progress("reading", total, "B") as advance:
        for group in range(len(texts.group_bytes)):
            for task in texts.tasks(group, advance):
                for piece in read_pieces(task, options.encode, bad):
                    if piece.text and document_share(piece.text.encode()) < share:
                        empty = False
                        yield piece.text
    if bad:
        note(f"note: {counted(len(bad), 'line')} left out that cannot be read")
    if empty:
        raise InputError(
            "no text to learn from: all documents are empty, or --sample-bytes is too small"
        )


class TextCorpus:
    """A corpus of texts that are encoded with a tokenizer."""

    def __init__(self, options: TextOptions, output: OutputOptions):
        """Open the texts, and divide them into groups. Raise InputError for bad options or
        inputs."""
        self._options = options
        if options.deduplicate is not None:
            check(options.deduplicate)
        names = {
            "documents": True,
            "empty_documents": True,
            "duplicates": options.deduplicate is not None,
            "bad_lines": options.encode.skip_bad_lines,
            "text_bytes": True,
            "train_tokens": True,
            "valid_tokens": True,
        }
        self.counted = tuple(name for name, counted in names.items() if counted)
        self._duplicates: Duplicates | None = None
        name = options.encode.tokenizer
        self.vocabulary = load_tokenizer(name)
        self.tokenizer_file = tokenizer_file(name)
        self._texts = _open(options, output.shard_tokens * _TEXT_BYTES_PER_TOKEN)
        self.group_bytes = self._texts.group_bytes

    def identity(self) -> dict[str, Any]:
        """Return the facts that determine the tokens: the tokenizer, properties of the inputs, and
        options."""
        skipping = {}
        if self._options.encode.skip_bad_lines:
            # the option is stored only if it is set, because older versions did not have it, and
            # this version must be able to continue their outputs
            skipping["skip_bad_lines"] = True
        return {
            "tokenizer": self.vocabulary.name,
            "tokenizer_sha256": self.vocabulary.sha256,
            "text_field": self._options.encode.text_field,
            "errors": self._options.encode.errors,
            "deduplicate": self._options.deduplicate,
            **skipping,
            **self._texts.identity(),
        }

    def _workers(self, work: Work) -> int:
        """Return the number of processes that encode the groups in `work`."""
        if self._options.stream is not None:  # the sizes are unknown
            return self._options.workers or work.cores
        size_bytes = sum(self.group_bytes[group] for group in work.groups)
        return self._options.workers or max(1, min(work.cores, size_bytes // _BYTES_PER_WORKER))

    def _read(self, work: Work, group: int) -> Iterator[Task]:
        return self._texts.tasks(group, work.advance)

    def preparations(self, work: Work, folder: Path) -> Sequence[Callable[[], None]]:
        """Return the two functions that find duplicates. In the first function, each rank reads its
        groups and stores the keys of the documents. In the second function, rank 0 compares the
        keys of all documents."""
        if self._options.deduplicate is None:
            return ()
        duplicates = self._duplicates = Duplicates(folder, self._options.deduplicate)

        def tasks(groups: list[int]) -> Iterator[Task]:
            """Return the tasks of `groups`, in order."""
            return (task for group in groups for task in self._read(work, group))

        def read_keys() -> None:
            """Compute the keys of this rank's documents, and write them to files."""
            duplicates.read_keys(work.groups, tasks, self._options.encode, self._workers(work))

        def find() -> None:
            """On rank 0, find the duplicates and write them to files."""
            if work.rank == 0:
                duplicates.find(len(self.group_bytes))

        return (read_keys, find)

    def _tasks(self, work: Work) -> Iterator[Task]:
        """Yield those tasks of the groups in `work` that are not in finished shards. Duplicate
        documents are marked in `dropped`."""
        for group in work.groups:
            first = work.first_block(group)
            dropped = None
            if self._duplicates:
                dropped = self._duplicates.of_task(group)
            for task in self._read(work, group):
                if task.index < first:
                    continue
                if dropped:
                    task = replace(task, dropped=dropped(task.index))
                yield task

    def encoded(self, work: Work) -> Iterator[Encoded]:
        """Yield the encoded tasks of the groups in `work`, except those in finished shards. Several
        processes encode them. Raise InputError for a file that cannot be read."""
        return map_in_order(self._tasks(work), Encoder, self._options.encode, self._workers(work))
