"""Token shards as a dataset: found, mapped, read as samples, checked.

`header.py` has the file format, `shard_writer.py` writes it. h5py opens a shard once, for the
metadata and the byte offset of `tokens` in the file; after that the tokens are read through
`np.memmap`, without HDF5.
"""

import mmap
import os
import resource
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ptdmpi.base.words import counted
from ptdmpi.config import InputError
from ptdmpi.data.header import (
    SUMMARY,
    ShardHeader,
    confirmed,
    format_checksum,
    headers_sha256,
    listed_headers,
    read_header,
)

UNFINISHED = ".unfinished"  # stands in a directory of shards as long as it is being written
_OPEN_SHARDS = 8192  # mapped at a time in one dataset; the kernel allows 65530 maps of a process
_OPEN_SHARE = 8  # a dataset takes at most one of so many of the file descriptors that are allowed
_READ_ROWS = 64  # samples copied and checked at a time
_VERIFY_TOKENS = 1 << 22  # tokens that `verify` looks at in one piece


def find_shards(directory: str | Path) -> list[Path]:
    """The shards of a dataset, in order of their names. Raises InputError if it has none."""
    directory = Path(directory)
    try:
        if not directory.is_dir():
            raise InputError(f"dataset {directory}: no such directory")
        names = os.listdir(directory)
    except OSError as error:
        raise InputError(f"dataset {directory}: {error.strerror}") from None
    shards = sorted(name for name in names if name.endswith(".h5"))
    if UNFINISHED in names:
        raise InputError(
            f"dataset {directory} is unfinished: run the same ptdmpi-data tokenize again to "
            "complete it"
        )
    if not shards:
        raise InputError(
            f"dataset {directory}: no *.h5 file in it; make some by ptdmpi-data tokenize"
        )
    return [directory / name for name in shards]


def find_headers(directory: str | Path) -> list[ShardHeader]:
    """The headers of a dataset's shards: from the list beside them where they are in it, and all
    but the first not confirmed. Raises InputError as `find_shards` and `read_header` do, for a
    damaged list, and for a shard that is listed and gone.
    """
    paths = find_shards(directory)
    listed = listed_headers(Path(directory))
    gone = sorted(listed.keys() - {path.name for path in paths})
    if gone:
        raise InputError(
            f"dataset {directory}: {gone[0]}, listed in its {SUMMARY}, is gone, of "
            f"{counted(len(gone), 'such shard')}; bring them back, or remove {SUMMARY} to do "
            "without them"
        )
    first, *others = [listed.get(path.name) or read_header(path) for path in paths]
    return [confirmed(first), *others]


def map_tokens(header: ShardHeader) -> np.ndarray:
    """All tokens of a shard, read-only, paged in by the operating system as they are touched.
    Raises InputError as `confirmed` does, and where the file cannot be mapped."""
    header = confirmed(header)
    try:
        mapped = np.memmap(header.path, header.dtype, "r", header.byte_offset, (header.tokens,))
    except (OSError, ValueError) as error:  # replaced or cut since its header was read
        raise InputError(f"shard {header.path}: cannot be mapped: {error}") from error
    return mapped.view(np.ndarray)  # slicing the subclass costs three times as much


def map_documents(header: ShardHeader) -> np.ndarray:
    """Document offsets of a shard, uint64 [documents + 1], mapped like the tokens."""
    header = confirmed(header)
    offset, shape = header.documents_byte_offset, (header.documents + 1,)
    return np.memmap(header.path, "<u8", "r", offset, shape).view(np.ndarray)


def _open_limit(shards: int) -> int:
    """How many shards of a dataset may be open at a time: each takes a file descriptor.

    The soft limit, often 1024, is raised as far as the system lets every process raise it: opening
    a shard anew for each sample costs ten times as much as reading the sample.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < min(hard, _OPEN_SHARE * shards):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return min(_OPEN_SHARDS, max(1, soft // _OPEN_SHARE))


class _MappedTokens:
    """The tokens of a shard, mapped. A file that was cut while it is mapped would end the process
    by a bus error, without a word: so its size is looked at (1 us) before it is read."""

    def __init__(self, header: ShardHeader):
        self._path = header.path
        self._tokens = map_tokens(header)
        mapped: Any = self._tokens.base  # numpy's types know of arrays only
        while not isinstance(mapped, mmap.mmap):
            mapped = mapped.base
        self._size = mapped.size  # of the file, now
        self._end = header.byte_offset + self._tokens.nbytes

    def __getitem__(self, part: slice) -> np.ndarray:
        if self._size() < self._end:
            raise InputError(
                f"shard {self._path}: was truncated while it was read, to {self._size():,} bytes; "
                'bring it back (data.reader = "pread" reads what is there still)'
            )
        return self._tokens[part]


def map_weights(header: ShardHeader) -> np.ndarray:
    """Weights of the tokens of a shard that has any, uint8 [tokens], mapped like the tokens."""
    header = confirmed(header)
    offset = header.weights_byte_offset
    return np.memmap(header.path, "u1", "r", offset, (header.tokens,)).view(np.ndarray)


class _PreadTokens:
    """The tokens of a shard, read by pread as they are sliced."""

    def __init__(self, header: ShardHeader):
        self._header = header = confirmed(header)
        self._descriptor = os.open(header.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def __getitem__(self, part: slice) -> np.ndarray:
        header = self._header
        width = header.dtype.itemsize
        size_bytes = (part.stop - part.start) * width
        piece = os.pread(self._descriptor, size_bytes, header.byte_offset + part.start * width)
        if len(piece) != size_bytes:
            raise InputError(f"shard {header.path}: was truncated while it was read")
        return np.frombuffer(piece, header.dtype)


_Tokens = _MappedTokens | _PreadTokens


def _confirm(headers: list[ShardHeader], shard: int) -> ShardHeader:
    """One of the headers, confirmed for good."""
    headers[shard] = confirmed(headers[shard])
    return headers[shard]


def _first_samples(headers: Sequence[ShardHeader], seq_length: int) -> list[int]:
    """The first sample of each shard, and the number of all."""
    return [0, *accumulate((header.tokens - 1) // seq_length for header in headers)]


Address = tuple[int, int, int]  # number of a dataset, a shard of it, the first token in that


class Dataset:
    """A directory of shards with one tokenizer, seen as a sequence of training samples.

    A sample is seq_length + 1 consecutive tokens of one shard (the inputs and, one to the right,
    the labels); sample j of a shard starts at token j * seq_length. `use_mmap=False` reads by
    pread, for file systems where mapping hurts. Shards that are listed beside them are looked into
    when they are first read. Raises InputError if there is no shard, if one is damaged or gone, or
    if they differ in tokenizer, vocabulary size or eod_id.
    """

    def __init__(self, directory: str | Path, use_mmap: bool = True):
        self.directory = Path(directory)
        self.headers = find_headers(directory)
        first = self.headers[0]
        for header in self.headers:
            for name in ("tokenizer_sha256", "vocab_size", "eod_id", "row_length"):
                if getattr(header, name) != getattr(first, name):
                    raise InputError(
                        f"shard {header.path} has {name} {getattr(header, name)}, but {first.path} "
                        f"has {getattr(first, name)}: all shards of a dataset must have the same"
                    )
        self.tokenizer = first.tokenizer
        self.tokenizer_sha256 = first.tokenizer_sha256
        self.vocab_size = first.vocab_size
        self.eod_id = first.eod_id
        # of the rows that its documents are packed in, whose tokens have weights; 0: in none
        self.row_length = first.row_length
        self.token_count = sum(header.tokens for header in self.headers)
        self.dtype = max((header.dtype for header in self.headers), key=lambda kind: kind.itemsize)
        # Caches that do not refer to the dataset: files close when it goes, not at some collection.
        open_tokens = _MappedTokens if use_mmap else _PreadTokens
        headers = self.headers
        self.shard_tokens: Callable[[int], _Tokens] = lru_cache(_open_limit(len(headers)))(
            lambda shard: open_tokens(_confirm(headers, shard))
        )
        self._first_samples = lru_cache(4)(partial(_first_samples, headers))

    @property
    def sha256(self) -> str:
        """That of the headers of its shards, which have their checksums."""
        return headers_sha256(self.headers)

    def samples(self, seq_length: int) -> int:
        """The number of training samples. Raises InputError if no shard has seq_length + 1
        tokens."""
        count = self._first_samples(seq_length)[-1]
        if count == 0:
            longest = max(header.tokens for header in self.headers)
            raise InputError(
                f"dataset {self.directory} is shorter than one sequence: its longest shard has "
                f"{longest} tokens, seq_length {seq_length} needs {seq_length + 1}"
            )
        return count

    def places(self, sample_indices: np.ndarray, seq_length: int) -> np.ndarray:
        """Shard, and first token in it, of samples (int [n]): int64 [2, n]. Raises IndexError for
        one that does not exist."""
        firsts = np.array(self._first_samples(seq_length))
        indices = np.asarray(sample_indices, dtype=np.int64)
        if indices.size and not 0 <= indices.min() <= indices.max() < firsts[-1]:
            raise self._no_sample(firsts[-1])
        shards = np.searchsorted(firsts, indices, side="right") - 1
        return np.stack([shards, (indices - firsts[shards]) * seq_length])

    def _no_sample(self, count: int) -> IndexError:
        return IndexError(f"sample outside [0, {count}) of dataset {self.directory}")

    def read(self, sample_indices: np.ndarray, seq_length: int) -> np.ndarray:
        """Samples (int [n]) as int64 [n, seq_length + 1]. Raises what `places` and `gather` do."""
        firsts, places = self._first_samples(seq_length), []
        # as `places`, in plain integers: for a few samples numpy costs more than reading them
        for sample in sample_indices.tolist():
            if not 0 <= sample < firsts[-1]:
                raise self._no_sample(firsts[-1])
            shard = bisect_right(firsts, sample) - 1
            places.append((0, shard, (sample - firsts[shard]) * seq_length))
        return gather([self], places, seq_length + 1)

    def weights(self, shard: int) -> np.ndarray:
        """Weights of the tokens of one shard as labels, uint8; of a dataset that has rows."""
        return map_weights(_confirm(self.headers, shard))

    def documents(self, shard: int) -> np.ndarray:
        """Document offsets of one shard, uint64 [documents + 1]: document i is tokens [o[i],
        o[i+1])."""
        return map_documents(_confirm(self.headers, shard))


def gather(datasets: Sequence[Dataset], places: Sequence[Address], width: int) -> np.ndarray:
    """Tokens [start, start + width) of each (dataset's number, shard, start): int64 [n, width].

    Raises InputError for a token id outside the vocabulary (shard, position, id), which is that of
    the first dataset. Rows are copied and checked in the shards' narrow type, a few at a time,
    while they are in the processor's cache.
    """
    rows = np.empty((len(places), width), dtype=np.int64)
    if len(places) == 1:  # the copy and the array for it would cost half as much as the read
        number, shard, start = places[0]
        tokens = rows[0] = datasets[number].shard_tokens(shard)[start : start + width]
        _check_ids(datasets, places, tokens)
        return rows
    dtype = datasets[0].dtype
    if len(datasets) > 1:
        dtype = max((dataset.dtype for dataset in datasets), key=lambda kind: kind.itemsize)
    narrow = np.empty((min(len(places), _READ_ROWS), width), dtype)
    for begin in range(0, len(places), _READ_ROWS):
        part = places[begin : begin + _READ_ROWS]
        for row, (number, shard, start) in enumerate(part):
            narrow[row] = datasets[number].shard_tokens(shard)[start : start + width]
        ready = narrow[: len(part)]
        # before they are widened: a quarter or half of the bytes to look at
        _check_ids(datasets, part, ready)
        rows[begin : begin + _READ_ROWS] = ready
    return rows


def _check_ids(datasets: Sequence[Dataset], places: Sequence[Address], tokens: np.ndarray) -> None:
    """Raises InputError if one of the tokens of some places (their rows, or the only row) is
    outside the vocabulary. argmax is the quickest way to look at all ids."""
    size = datasets[0].vocab_size
    if tokens.item(tokens.argmax()) >= size:
        ids = tokens.reshape(len(places), -1)
        row, column = np.argwhere(ids >= size)[0].tolist()
        number, shard, start = places[row]
        raise InputError(
            f"shard {datasets[number].headers[shard].path}: token {start + column} has id "
            f"{ids[row, column]}, outside the vocabulary of {size}"
        )


def _weight_problems(header: ShardHeader) -> list[str]:
    if not header.weights_byte_offset:
        return []
    weights, checksum = map_weights(header), 0
    for start in range(0, header.tokens, _VERIFY_TOKENS):
        piece = weights[start : start + _VERIFY_TOKENS]
        checksum = zlib.crc32(piece.data, checksum)
        if piece.max() > 1:
            at = int(np.argmax(piece > 1))
            return [f"{header.path}: token {start + at} has weight {piece[at]}; legal: 0 or 1"]
    found = format_checksum(checksum)
    if found != header.weights_checksum:
        return [f"{header.path}: weights' checksum {found}, recorded {header.weights_checksum}"]
    return []


def _offset_problems(header: ShardHeader) -> list[str]:
    documents = map_documents(header)
    for start in range(0, header.documents, _VERIFY_TOKENS):
        piece = documents[start : start + _VERIFY_TOKENS + 1]
        wrong = np.flatnonzero(piece[1:] <= piece[:-1])
        if wrong.size:
            return [f"{header.path}: document {start + wrong[0]} does not end after its start"]
    return []


def verify(path: str | Path) -> list[str]:
    """Read a whole shard in bounded memory; the problems found, one line each, none if it is sound.

    Checked: header, checksums of the bytes of tokens and weights, ids inside the vocabulary,
    weights 0 or 1, document offsets rising.
    """
    try:
        header = read_header(path)
        tokens = map_tokens(header)
    except InputError as error:
        return [str(error)]
    problems: list[str] = []
    checksum = 0
    for start in range(0, header.tokens, _VERIFY_TOKENS):
        piece = tokens[start : start + _VERIFY_TOKENS]
        checksum = zlib.crc32(piece.data, checksum)
        if not problems and piece.max() >= header.vocab_size:
            at = int(np.argmax(piece >= header.vocab_size))
            problems.append(
                f"{path}: token {start + at} has id {piece[at]}, outside the vocabulary of "
                f"{header.vocab_size}"
            )
    if format_checksum(checksum) != header.checksum:
        problems.append(f"{path}: checksum {format_checksum(checksum)}, recorded {header.checksum}")
    return problems + _weight_problems(header) + _offset_problems(header)
