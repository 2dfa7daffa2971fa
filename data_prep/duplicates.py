"""Deduplication of a corpus. If several documents are equal, or nearly equal, only the first one is
kept.

With deduplication, a corpus is read twice. In the first reading, every document gets keys, which
are 64-bit numbers: one hash of its bytes (exact), or one hash of each band of its MinHash signature
(near). Two documents are duplicates if they have a common key, or if they are connected by a chain
of documents in which neighbours have a common key. In the second reading, only the first document
of each set of duplicates is kept. So the result depends only on the files and the options.

Sources: Broder, "On the resemblance and containment of documents", SEQUENCES 1997 (MinHash);
Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", section 3.4 (bands). The numbers of
hashes and bands are those of FineWeb (Penedo et al. 2024): 112 hashes of shingles (runs of 5
words), in 14 bands of 8 hashes.
"""

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from data_prep.encode import EncodeOptions, map_in_order, read_pieces
from data_prep.other_tokenizers import MISSING
from data_prep.sources import Task
from data_prep.state import write_file
from ptdmpi.config import InputError

EXACT = "exact"
NEAR = "near"
_BANDS = 14
_ROWS = 8  # number of hashes in a band of the signature
_SHINGLE_WORDS = 5
_SEED = 1
_ODD = np.uint64(0x9E3779B97F4A7C15)
# kind of file -> element type and number of dimensions of its array
_FILES = {"keys": (np.uint64, 2), "begun": (np.int64, 1), "dropped": (np.bool_, 1)}
_RESTART = "use --force to start again"


@dataclass(frozen=True)
class TaskKeys:
    """The hashes of the text pieces (see `encode.TextPiece`) of a task (see `sources.Task`). For
    exact deduplication, `hashes` has hashes of the bytes, uint64 [pieces, 1]. For near
    deduplication, `hashes` has MinHash signatures, uint32 [pieces, 112]."""

    group: int
    hashes: np.ndarray
    first: list[bool]  # for each piece: True if a document begins with it
    last: list[bool]  # for each piece: True if a document ends with it


def _exact_hash(text: str) -> np.ndarray:
    """Return a 64-bit hash of a text, uint64 [1]."""
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), "<u8")


def _signature(text: str) -> np.ndarray:
    """Return the MinHash signature of a text, uint32 [112]. The signature is computed from the
    shingles of the text: all runs of 5 consecutive words."""
    from rensa import RMinHash

    words = text.lower().split()
    count = max(1, len(words) - _SHINGLE_WORDS + 1)
    sketch = RMinHash(_BANDS * _ROWS, _SEED)
    sketch.update({" ".join(words[at : at + _SHINGLE_WORDS]) for at in range(count)})
    return np.array(sketch.digest(), np.uint32)


class ExactKeys:
    """The keys for exact deduplication: equal documents have equal keys. `columns` is the number of
    keys per document."""

    columns = 1

    def __init__(self, options: EncodeOptions):
        self._options = options

    def hash(self, text: str) -> np.ndarray:
        """Return the hash of a piece of text, as a row of `TaskKeys.hashes`."""
        return _exact_hash(text)

    @staticmethod
    def keys(pieces: Sequence[np.ndarray]) -> np.ndarray:
        """Return the keys of a document, uint64 [columns]. `pieces` are the hashes of its
        pieces."""
        if len(pieces) == 1:
            return pieces[0]
        return _exact_hash(np.concatenate(pieces).tobytes().hex())

    def __call__(self, task: Task) -> TaskKeys:
        """Return the hashes of the text pieces in a task. Empty documents are left out."""
        pieces = [piece for piece in read_pieces(task, self._options) if not piece.is_nothing]
        hashes = [self.hash(piece.text) for piece in pieces]
        return TaskKeys(
            task.group,
            np.array(hashes),
            [piece.first for piece in pieces],
            [piece.last for piece in pieces],
        )


class NearKeys(ExactKeys):
    """The keys for near deduplication: nearly equal documents very probably have a common key. A
    document has one key for each band of its MinHash signature."""

    columns = _BANDS

    def hash(self, text: str) -> np.ndarray:
        """Return the MinHash signature of a piece of text, uint32 [112]."""
        return _signature(text)

    @staticmethod
    def keys(pieces: Sequence[np.ndarray]) -> np.ndarray:
        """Return the keys of a document, uint64 [14]: a hash of each band of its signature.
        `pieces` are the signatures of its pieces."""
        bands = np.minimum.reduce(pieces).astype(np.uint64).reshape(_BANDS, _ROWS)
        keys = np.zeros(_BANDS, np.uint64)
        for row in range(_ROWS):
            keys = (keys ^ bands[:, row]) * _ODD
            keys ^= keys >> np.uint64(29)
        return keys


KINDS: dict[str, type[ExactKeys]] = {EXACT: ExactKeys, NEAR: NearKeys}


def check(kind: str) -> None:
    """Raise InputError if the library that this kind of deduplication needs is not installed."""
    if kind == NEAR:
        try:
            import rensa
        except ImportError as error:
            raise InputError(f"--deduplicate near needs rensa: {MISSING}") from error
        assert rensa.RMinHash


class Duplicates:
    """The results of the first reading of the corpus, stored in a folder with three files per
    group.

    The file "keys" contains the keys of the group's documents. The file "begun" contains, for each
    task, the number of the group's documents that begin before the task. The last entry of this
    file is the number of all documents of the group. The file "dropped" contains a bool for each
    document, which is True if the document is left out.
    """

    def __init__(self, folder: Path, kind: str):
        self._folder = folder
        self._kind = KINDS[kind]

    def _path(self, what: str, group: int) -> Path:
        return self._folder / f"{what}-{group:05d}.npy"

    def _write(self, what: str, group: int, values: np.ndarray) -> None:
        content = io.BytesIO()
        np.save(content, values)
        write_file(self._path(what, group), content.getvalue())

    def _read(self, what: str, group: int) -> np.ndarray:
        """Return the array in a group's file of the kind `what` (a key of `_FILES`), mapped into
        memory. Raise InputError if the file is missing or damaged."""
        path = self._path(what, group)
        dtype, dims = _FILES[what]
        try:
            values = np.load(path, mmap_mode="r")
        # numpy may raise any exception, because it parses the header as a Python expression
        except Exception as error:
            raise InputError(f"{path}: cannot be read: {error}; {_RESTART}") from error
        if values.dtype != dtype or values.ndim != dims:
            raise InputError(f"{path}: has {values.dtype} in {values.ndim} dims; {_RESTART}")
        return values

    def read_keys(
        self,
        groups: Iterable[int],
        tasks: Callable[[list[int]], Iterator[Task]],
        options: EncodeOptions,
        workers: int,
    ) -> None:
        """Read the `groups` whose keys are not stored yet, with `workers` processes, and store the
        keys of their documents.

        `tasks` is a function that returns the tasks of the given groups.
        """
        missing = [group for group in groups if not self._path("begun", group).exists()]
        hashed = map_in_order(tasks(missing), self._kind, options, workers)
        written = set()
        for group, parts in groupby(hashed, key=lambda part: part.group):
            written.add(group)
            self._write_group(group, parts)
        for group in missing:
            if group not in written:
                self._write_group(group, ())

    def _write_group(self, group: int, parts: Iterable[TaskKeys]) -> None:
        """Write the keys of the documents of a group. `parts` yields the hashes of the group's
        tasks, in order."""
        keys: list[np.ndarray] = []
        begun = [0]  # number of documents that begin before each task
        waiting: list[np.ndarray] = []  # hashes of the pieces of an incomplete document
        for part in parts:
            for hashes, last in zip(part.hashes, part.last, strict=True):
                waiting.append(hashes)
                if last:
                    keys.append(self._kind.keys(waiting))
                    waiting = []
            begun.append(begun[-1] + sum(part.first))
        table = np.array(keys, np.uint64).reshape(len(keys), self._kind.columns)
        self._write("keys", group, np.asfortranarray(table))
        self._write("begun", group, np.array(begun))

    def find(self, groups: int) -> None:
        """Find the duplicates among the documents of all groups, and write, for each group, which
        documents are left out. The search needs 24 bytes of memory per document."""
        tables = [self._read("keys", group) for group in range(groups)]
        ends = np.cumsum([0, *(len(table) for table in tables)])
        dropped = repeated(
            lambda column: np.concatenate([table[:, column] for table in tables]),
            self._kind.columns,
            int(ends[-1]),
        )
        for group in range(groups):
            self._write("dropped", group, dropped[ends[group] : ends[group + 1]])

    def of_task(self, group: int) -> Callable[[int], np.ndarray]:
        """Return a function that takes the index of a task in the group, and returns a bool array
        [1 + documents that begin in the task]. An element is True if the document is left out.

        The first element of the array is for the document that continues from the previous task.
        Raise InputError if the stored files of the group are damaged.
        """
        begun = self._read("begun", group)
        dropped = self._read("dropped", group)
        if not begun.size or begun[-1] != dropped.size or (begun[1:] < begun[:-1]).any():
            raise InputError(
                f"{self._path('begun', group)}: does not fit {dropped.size} documents; {_RESTART}"
            )
        padded = np.concatenate([[False], dropped])
        return lambda index: padded[begun[index] : begun[index + 1] + 1]


def repeated(column: Callable[[int], np.ndarray], columns: int, size: int) -> np.ndarray:
    """Return a bool array [size] that is True for each duplicate of an earlier document. A document
    is a duplicate if it has a common key with an earlier document, or if a chain of documents, in
    which neighbours have a common key, connects it with an earlier document.

    `column` is a function that takes the index of a column and returns the keys of all documents in
    this column, uint64 [size]. Only keys in the same column are compared; `columns` is the number
    of columns. At first, the label of each document is its index. Then, for each column in turn,
    each document takes the lowest label of all documents with the same key. These passes over the
    columns are repeated until no label changes. At the end, the label of a document is the index of
    the first document to which it is connected.
    """
    labels = np.arange(size)
    changed = size > 0
    while changed:
        changed = False
        for number in range(columns):
            keys = column(number)
            order = np.argsort(keys, kind="stable")
            keys = keys[order]
            starts = np.concatenate([[0], np.flatnonzero(keys[1:] != keys[:-1]) + 1])
            least = np.minimum.reduceat(labels[order], starts)
            least = np.repeat(least, np.diff(np.append(starts, size)))
            changed = changed or bool((least != labels[order]).any())
            labels[order] = least
            labels = labels[labels]
        changed = changed and columns > 1
    return labels != np.arange(size)
