"""Arrays that a model has computed for the tokens of a dataset, in a folder of the dataset.

For each shard, the folder has arrays in numpy's format, one row per token. The model computed row i
for token i, given the earlier tokens. A summary in the folder names the model and the shards, with
checksums. The summary is written after the arrays.
"""

import contextlib
import hashlib
import itertools
import json
import tokenize
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from ptdmpi.base.disk import open_file, read_file, replacing, write_whole
from ptdmpi.config import InputError
from ptdmpi.data.documents import Locate
from ptdmpi.data.header import ShardHeader, format_checksum
from ptdmpi.data.shards import Dataset

# the exceptions that numpy raises for an array with a damaged header
BAD_ARRAY = (ValueError, TypeError, EOFError, OverflowError, SyntaxError, tokenize.TokenError)
_OPEN_SHARDS = 512  # maximum number of shards whose arrays are mapped at a time


@dataclass(frozen=True)
class ScoreKind:
    """A kind of arrays that a model computes for the tokens of a dataset. `folder` is the name of
    the arrays' folder and of the summary. `noun` names the arrays in messages, and `made_by` is the
    command that makes them. A shard may have several arrays, whose file names differ in the suffix.
    `types` maps each suffix to the legal data types of its array. `blank` maps each suffix to the
    value that the array has for tokens without a score.
    """

    folder: str
    noun: str
    made_by: str
    types: Mapping[str, tuple[type, ...]]
    blank: Mapping[str, float]

    def path(self, header: ShardHeader, suffix: str) -> Path:
        """Return the path of the file with the array `suffix` of the shard with this header."""
        return header.path.parent / self.folder / f"{header.path.stem}{suffix}.npy"

    def summary(self, directory: Path) -> Path:
        """Return the path of the summary for the dataset in `directory`."""
        return directory / self.folder / f"{self.folder}.json"

    def write_summary(self, directory: Path, summary: Mapping[str, Any]) -> None:
        """Write the summary, after the arrays of all shards are written. The entry "model" of
        `summary` is the name of the model, and the entry "shards" maps the name of each shard to
        its entry. Raise InputError if the summary cannot be written.
        """
        path = self.summary(directory)
        try:
            write_whole(path, json.dumps(summary, indent=1) + "\n")
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None


class ScoreWriter:
    """A writer of the arrays of one shard, in the order of the shard's tokens.

    Arrays are appended piece by piece, because the arrays of a whole shard may not fit into memory.
    At the end of a `with` block, the writer removes unfinished files.
    """

    def __init__(self, kind: ScoreKind, header: ShardHeader) -> None:
        self.kind = kind
        self.header = header
        self._files: dict[str, BinaryIO] = {}
        self._checksums = dict.fromkeys(kind.types, 0)
        self._blanks: dict[str, np.ndarray] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # Files whose writing has not ended are still in `replacing` contexts. Such a context
        # removes its unfinished file if it receives an exception, so pass one.
        self._stack.__exit__(InterruptedError, InterruptedError(), None)

    def open(self, rows: Mapping[str, tuple[type, tuple[int, ...]]]) -> None:
        """Create one file for each array. `rows` maps the suffix of the file's name to the data
        type and the shape of a token's row in the array. Raise InputError if a file cannot be
        written.
        """
        for suffix, (kind, shape) in rows.items():
            path = self.kind.path(self.header, suffix)
            with self._reported(path):
                path.parent.mkdir(exist_ok=True)
                # remove an earlier summary, because its checksums do not match the new values
                self.kind.summary(self.header.path.parent).unlink(missing_ok=True)
                temporary = self._stack.enter_context(replacing(path))
                file = self._stack.enter_context(temporary.open("wb"))
                np.lib.format.write_array_header_1_0(
                    file,
                    {
                        "descr": np.lib.format.dtype_to_descr(np.dtype(kind)),
                        "fortran_order": False,
                        "shape": (self.header.tokens, *shape),
                    },
                )
            self._files[suffix] = file
            self._blanks[suffix] = np.full((1, *shape), self.kind.blank[suffix], kind)

    def append(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Append the rows of the next tokens to the files of the arrays. `arrays` maps the suffix
        of a file's name to the rows. Raise InputError if the disk fails.
        """
        for suffix, values in arrays.items():
            wanted = values.astype(self._blanks[suffix].dtype, copy=False)
            data = np.ascontiguousarray(wanted).tobytes()
            with self._reported(self.kind.path(self.header, suffix)):
                self._files[suffix].write(data)
            self._checksums[suffix] = zlib.crc32(data, self._checksums[suffix])

    def skip(self, tokens: int) -> None:
        """Append blank rows for the next `tokens` tokens, which have no score."""
        self.append({name: blank.repeat(tokens, 0) for name, blank in self._blanks.items()})

    def close(self) -> dict[str, Any]:
        """Give the files of the arrays their final names, and return the shard's entry in the
        summary. Raise InputError if the disk fails."""
        with self._reported(self.header.path.parent / self.kind.folder):
            self._stack.close()
        checksums = {
            f"checksum{name}": format_checksum(crc) for name, crc in self._checksums.items()
        }
        return {"shard": _identity(self.header), **checksums}

    @contextlib.contextmanager
    def _reported(self, path: Path) -> Iterator[None]:
        """Return a context that raises InputError, with the path, if the disk fails in the `with`
        block.
        """
        try:
            yield
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None


class StoredScores:
    """The stored arrays of one kind for one dataset. `summary` has the content of the summary, and
    `model` is the model's name in the summary."""

    def __init__(self, kind: ScoreKind, dataset: Dataset) -> None:
        """Read the summary and the header of each array. Raise InputError if there is no summary,
        if it was made from other shards, or if an array has the wrong type or size."""
        self.kind = kind
        self.directory = dataset.directory
        self._headers = dataset.headers
        self.summary = _read_summary(kind, dataset.directory)
        self.model = str(self.summary["model"])
        self._checksums: list[dict[str, str]] = []
        for header in dataset.headers:
            entry = self.summary["shards"].get(header.path.name)
            if entry is None or entry.get("shard") != _identity(header):
                raise InputError(
                    f"{kind.summary(self.directory).parent}: has no {kind.noun} of the current "
                    f"{header.path.name}; {kind.made_by}"
                )
            checksums = {suffix: entry.get(f"checksum{suffix}") for suffix in kind.types}
            self._checksums.append({name: str(value) for name, value in checksums.items()})
        # A wrong file must stop a run at its start, not when a sample is needed hours later. So
        # open each array now, which checks its type and shape. The checksum of an array is computed
        # only when the array is used, because this computation reads the whole array.
        for number, suffix in itertools.product(range(len(self._headers)), kind.types):
            self._mapped(number, suffix)

    @property
    def sha256(self) -> str:
        """Return a hash of the checksums of all arrays, so that the arrays need not be read."""
        # if a kind has only one array per shard, the hash covers a flat list of checksums
        values = [list(entry.values()) for entry in self._checksums]
        flat = [entry[0] if len(entry) == 1 else entry for entry in values]
        return hashlib.sha256(json.dumps(flat).encode()).hexdigest()

    def shard(self, number: int, suffix: str) -> np.ndarray:
        """Return one array of one shard, [tokens, ...], mapped into memory. Raise InputError if the
        file is damaged or cannot be read."""
        values = self._mapped(number, suffix)
        if format_checksum(zlib.crc32(values.data)) != self._checksums[number][suffix]:
            path = self.kind.path(self._headers[number], suffix)
            raise InputError(f"{path}: is damaged: it has another checksum; {self.kind.made_by}")
        return values

    def _mapped(self, number: int, suffix: str) -> np.ndarray:
        """Return one array of one shard, [tokens, ...], mapped into memory, without computing its
        checksum. Raise InputError if the file is no array of the right type and shape."""
        header = self._headers[number]
        path = self.kind.path(header, suffix)
        try:
            with open_file(path, "rb"):  # raises OSError for a pipe.
                # this function, unlike `np.load`, reads only numpy's own format, never a pickle
                values: np.ndarray = np.lib.format.open_memmap(path, mode="r")
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}; {self.kind.made_by}") from None
        except BAD_ARRAY:
            raise InputError(f"{path}: is not an array of numpy; {self.kind.made_by}") from None
        if values.dtype not in self.kind.types[suffix] or values.shape[:1] != (header.tokens,):
            raise InputError(
                f"{path}: has {values.dtype} {list(values.shape)}; {self.kind.made_by}"
            )
        return values


class ScoredSamples:
    """A dataset together with arrays that a model has computed for it. `sha256` covers the arrays,
    so a run treats changed arrays as changed data."""

    def __init__(self, dataset: Dataset, scores: StoredScores) -> None:
        self._dataset = dataset
        self.tokenizer = dataset.tokenizer
        self.tokenizer_sha256 = dataset.tokenizer_sha256
        self.sha256 = hashlib.sha256((dataset.sha256 + scores.sha256).encode()).hexdigest()

    def samples(self, length: int) -> int:
        """Return the number of samples of `length` tokens."""
        return self._dataset.samples(length)


class LabelScores:
    """The stored arrays for the labels of samples, from the shards of several datasets."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        scores: Sequence[StoredScores],
        locate: Locate,
        length: int,
    ) -> None:
        self._datasets = datasets
        self._locate = locate
        self._length = length
        self._shard: Callable[[int, int, str], np.ndarray] = lru_cache(_OPEN_SHARDS)(
            partial(_shard, tuple(scores))
        )

    def of(self, sample_ids: np.ndarray, suffix: str) -> np.ndarray:
        """Return the stored values for each label of the samples `sample_ids` (int [n]), [n,
        length, ...]. `suffix` names the array that has the values."""
        rows = []
        places = zip(*(column.tolist() for column in self._locate(sample_ids)), strict=True)
        for number, sample in places:
            (shard,), (start,) = self._datasets[number].places(np.array([sample]), self._length)
            stored = self._shard(number, int(shard), suffix)
            rows.append(stored[start + 1 : start + 1 + self._length])
        return np.stack(rows)


def _shard(scores: Sequence[StoredScores], dataset: int, shard: int, suffix: str) -> np.ndarray:
    return scores[dataset].shard(shard, suffix)


def _identity(header: ShardHeader) -> list[str]:
    """Return the values that identify a shard in the summary: the checksums of its tokens and of
    the weights of its tokens."""
    return [header.checksum, header.weights_checksum]


def _read_summary(kind: ScoreKind, directory: Path) -> dict[str, Any]:
    path = kind.summary(directory)
    try:
        summary = json.loads(read_file(path))
    except FileNotFoundError:
        raise InputError(f"{directory}: has no {kind.noun}; {kind.made_by}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}; {kind.made_by}") from None
    known = isinstance(summary, dict) and isinstance(summary.get("shards"), dict)
    if not known or not all(isinstance(entry, dict) for entry in summary["shards"].values()):
        raise InputError(f"{path}: is not a list of {kind.noun}; {kind.made_by}")
    return {"model": "", **summary}
