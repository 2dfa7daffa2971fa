"""Duplicates: of documents that are equal, or nearly, only the first of the corpus is kept.

A corpus is read twice. First every document gets keys, 64-bit numbers: one hash of its bytes
(exact), or one of each band of its MinHash signature (near). Documents that share a key are
duplicates, and so is what a chain of such pairs connects. The second reading leaves out all but the
first of each set, so that the result is a pure function of files and options.

Source: Broder, "On the resemblance and containment of documents", SEQUENCES 1997 (MinHash);
Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", section 3.4 (bands); the numbers are
FineWeb's (Penedo et al. 2024): 112 hashes of shingles of 5 words in 14 bands of 8.
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

EXACT, NEAR = "exact", "near"
_BANDS, _ROWS = 14, 8
_SHINGLE_WORDS = 5
_SEED = 1
_ODD = np.uint64(0x9E3779B97F4A7C15)
_FILES = {"keys": (np.uint64, 2), "begun": (np.int64, 1), "dropped": (np.bool_, 1)}  # type, dims
_ANEW = "use --force to begin anew"


@dataclass(frozen=True)
class TaskKeys:
    """Hashes of the pieces of a task: uint64 [pieces, 1], or uint32 signatures [pieces, 112]."""

    group: int
    hashes: np.ndarray
    first: list[bool]
    last: list[bool]


def _exact_hash(text: str) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), "<u8")


def _signature(text: str) -> np.ndarray:
    from rensa import RMinHash

    words = text.lower().split()
    count = max(1, len(words) - _SHINGLE_WORDS + 1)
    sketch = RMinHash(_BANDS * _ROWS, _SEED)
    sketch.update({" ".join(words[at : at + _SHINGLE_WORDS]) for at in range(count)})
    return np.array(sketch.digest(), np.uint32)


class ExactKeys:
    """Hashes the pieces of tasks."""

    columns = 1

    def __init__(self, options: EncodeOptions):
        self._options = options

    def hash(self, text: str) -> np.ndarray:
        return _exact_hash(text)

    @staticmethod
    def keys(pieces: Sequence[np.ndarray]) -> np.ndarray:
        """The keys of a document, from the hashes of its pieces: uint64 [columns]."""
        if len(pieces) == 1:
            return pieces[0]
        return _exact_hash(np.concatenate(pieces).tobytes().hex())

    def __call__(self, task: Task) -> TaskKeys:
        pieces = [piece for piece in read_pieces(task, self._options) if not piece.is_nothing]
        hashes = [self.hash(piece.text) for piece in pieces]
        return TaskKeys(
            task.group,
            np.array(hashes),
            [piece.first for piece in pieces],
            [piece.last for piece in pieces],
        )


class NearKeys(ExactKeys):
    """Takes MinHash signatures of the pieces of tasks."""

    columns = _BANDS

    def hash(self, text: str) -> np.ndarray:
        return _signature(text)

    @staticmethod
    def keys(pieces: Sequence[np.ndarray]) -> np.ndarray:
        bands = np.minimum.reduce(pieces).astype(np.uint64).reshape(_BANDS, _ROWS)
        keys = np.zeros(_BANDS, np.uint64)
        for row in range(_ROWS):
            keys = (keys ^ bands[:, row]) * _ODD
            keys ^= keys >> np.uint64(29)
        return keys


KINDS: dict[str, type[ExactKeys]] = {EXACT: ExactKeys, NEAR: NearKeys}


def check(kind: str) -> None:
    """Raises InputError where the library for near duplicates is missing."""
    if kind == NEAR:
        try:
            import rensa
        except ImportError as error:
            raise InputError(f"--deduplicate near needs rensa: {MISSING}") from error
        assert rensa.RMinHash


class Duplicates:
    """The state of the first reading, one file of keys and one of duplicates per group."""

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
        """Raises InputError for a file that is gone or is not what `_write` made."""
        path, (dtype, dims) = self._path(what, group), _FILES[what]
        try:
            values = np.load(path, mmap_mode="r")
        except Exception as error:  # of any class: a damaged head goes through a parser of Python
            raise InputError(f"{path}: cannot be read: {error}; {_ANEW}") from error
        if values.dtype != dtype or values.ndim != dims:
            raise InputError(f"{path}: has {values.dtype} in {values.ndim} dims; {_ANEW}")
        return values

    def read_keys(
        self,
        groups: Iterable[int],
        tasks: Callable[[list[int]], Iterator[Task]],
        options: EncodeOptions,
        workers: int,
    ) -> None:
        """Keys of the groups that have none yet."""
        missing = [group for group in groups if not self._path("begun", group).exists()]
        hashed = map_in_order(tasks(missing), self._kind, options, workers)
        found = set()
        for group, parts in groupby(hashed, key=lambda part: part.group):
            found.add(group)
            self._write_group(group, parts)
        for group in missing:
            if group not in found:
                self._write_group(group, ())

    def _write_group(self, group: int, parts: Iterable[TaskKeys]) -> None:
        keys: list[np.ndarray] = []
        begun = [0]  # documents that begin before each task
        waiting: list[np.ndarray] = []
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
        """Which documents are left out: of all groups at once, 24 bytes of memory for each."""
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
        """For each task of a group: is the document left out that goes on in it, and those that
        begin in it; bool [1 + documents that begin]."""
        begun, dropped = self._read("begun", group), self._read("dropped", group)
        if not begun.size or begun[-1] != dropped.size or (begun[1:] < begun[:-1]).any():
            raise InputError(
                f"{self._path('begun', group)}: does not go with {dropped.size} documents; {_ANEW}"
            )
        padded = np.concatenate([[False], dropped])
        return lambda index: padded[begun[index] : begun[index + 1] + 1]


def repeated(column: Callable[[int], np.ndarray], columns: int, size: int) -> np.ndarray:
    """Which of `size` documents share a key of some column with one before them, or are connected
    with one by a chain of such pairs: bool [size]. `column` gives a column's keys, uint64 [size].

    Every document takes the least number of those with its key, in all columns in turn, until
    nothing changes: then it is the number of the first that it is connected with.
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
