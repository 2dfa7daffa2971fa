"""Datasets of token shards: finding, mapping, reading and verifying the shards.

`header.py` describes the file format, and `shard_writer.py` writes shards. h5py opens a shard once,
to read the metadata and the byte offset of the dataset `tokens` in the file. The tokens themselves
are read through `np.memmap`, without HDF5.
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
from numpy.typing import DTypeLike

from ptdmpi.base.words import counted
from ptdmpi.config import InputError
from ptdmpi.data.blocks import Tokens, VerifiedTokens, block_sums, require_checksum
from ptdmpi.data.header import (
    SUMMARY,
    ShardHeader,
    confirmed,
    format_checksum,
    headers_sha256,
    listed_headers,
    read_header,
)

# While shards are written into a directory, the directory contains a folder with this name.
UNFINISHED = ".unfinished"
# maximum number of shards of one dataset that are mapped at a time; the kernel allows 65530 maps
# per process
_OPEN_SHARDS = 8192
_OPEN_SHARE = 8  # a dataset uses at most an eighth of the allowed file descriptors.
_READ_ROWS = 64  # number of samples that are copied and checked at a time.
_VERIFY_TOKENS = 1 << 22  # number of tokens that `verify` reads in one piece


def find_shards(directory: str | Path) -> list[Path]:
    """Return the paths of the shards in a dataset's directory, sorted by name. Raise InputError if
    the directory has no shards, or if its shards are still being written."""
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
            f"dataset {directory} has no *.h5 files; make some with ptdmpi-data tokenize"
        )
    return [directory / name for name in shards]


def find_headers(directory: str | Path) -> list[ShardHeader]:
    """Return the headers of a dataset's shards, sorted by name.

    If SUMMARY lists the shards, the headers come from SUMMARY, and only the first header is
    compared with its file. Raise InputError if SUMMARY is damaged, or if a listed shard is missing.
    Also raise the same errors as `find_shards` and `read_header`.
    """
    paths = find_shards(directory)
    listed = listed_headers(Path(directory))
    gone = sorted(listed.keys() - {path.name for path in paths})
    if gone:
        raise InputError(
            f"dataset {directory}: its {SUMMARY} lists {counted(len(gone), 'shard')} that cannot "
            f"be found, such as {gone[0]}; restore them, or remove {SUMMARY} to train without them"
        )
    first, *others = [listed.get(path.name) or read_header(path) for path in paths]
    return [confirmed(first), *others]


def map_tokens(header: ShardHeader) -> np.ndarray:
    """Return all tokens of a shard as a read-only array. The file is mapped into memory, so the
    operating system reads a page of the file when the page is first accessed.

    Raise InputError if the file cannot be mapped. Also raise the same errors as `confirmed`.
    """
    header = confirmed(header)
    return _mapped(header, header.dtype, header.byte_offset, header.tokens)


def map_documents(header: ShardHeader) -> np.ndarray:
    """Return the document offsets of a shard, uint64 [documents + 1], mapped into memory. Raise the
    same errors as `map_tokens`."""
    header = confirmed(header)
    return _mapped(header, "<u8", header.documents_byte_offset, header.documents + 1)


def _mapped(header: ShardHeader, kind: DTypeLike, offset: int, count: int) -> np.ndarray:
    """Return `count` numbers of the type `kind`, which begin at byte `offset` of a shard, mapped
    into memory. Raise InputError if the file cannot be mapped."""
    try:
        mapped = np.memmap(header.path, kind, "r", offset, (count,))
    # this error means that the file was replaced or truncated after its header was read
    except (OSError, ValueError) as error:
        raise InputError(f"shard {header.path}: cannot be mapped: {error}") from error
    # return a plain array: slicing an object of the class memmap takes three times as long
    return mapped.view(np.ndarray)


def _open_limit(shards: int) -> int:
    """Return how many of a dataset's `shards` shards may be open at a time. Each open shard needs a
    file descriptor.

    If the dataset needs more descriptors than the soft limit permits (often 1024), the soft limit
    is raised to the hard limit. If too few shards may be open, a shard is opened for each sample,
    which takes ten times as long as reading the sample.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < min(hard, _OPEN_SHARE * shards):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return min(_OPEN_SHARDS, max(1, soft // _OPEN_SHARE))


class _MappedTokens:
    """The tokens of a shard, read through a memory map.

    If a file is truncated while it is mapped, reading the map ends the process by a bus error,
    without a message. To prevent this, each read checks the size of the file first, which takes 1
    us.
    """

    def __init__(self, header: ShardHeader):
        self._path = header.path
        self._tokens = map_tokens(header)
        # numpy's type annotation of `base` does not include memory maps
        mapped: Any = self._tokens.base
        while not isinstance(mapped, mmap.mmap):
            mapped = mapped.base
        self._size = mapped.size  # a function that returns the present size of the file
        self._end = header.byte_offset + self._tokens.nbytes

    def __getitem__(self, part: slice) -> np.ndarray:
        if self._size() < self._end:
            raise InputError(
                f"shard {self._path}: was truncated while it was read, to {self._size():,} bytes; "
                'restore it (data.reader = "pread" reads what is still there)'
            )
        return self._tokens[part]


def map_weights(header: ShardHeader) -> np.ndarray:
    """Return the weights of the tokens of a shard that stores weights, uint8 [tokens], mapped into
    memory. Raise the same errors as `confirmed`."""
    header = confirmed(header)
    return _mapped(header, "u1", header.weights_byte_offset, header.tokens)


def _crc32(values: np.ndarray) -> str:
    """Return the checksum of a mapped array, as shards record it."""
    return format_checksum(zlib.crc32(values.data))


class _PreadTokens:
    """The tokens of a shard, read from the file by the system call pread, one slice at a time."""

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


def _open_tokens(header: ShardHeader, use_mmap: bool, verified: bool) -> Tokens:
    """Open the tokens of a shard. If `verified` is True and the shard has checksums of blocks, each
    block is verified when one of its tokens is first read."""
    tokens: Tokens = _MappedTokens(header) if use_mmap else _PreadTokens(header)
    sums = block_sums(header.path, header.tokens) if verified else None
    return tokens if sums is None else VerifiedTokens(tokens, header, sums)


def _confirm(headers: list[ShardHeader], shard: int) -> ShardHeader:
    """Compare the header of shard number `shard` with the shard's file (`confirmed`). Put the
    confirmed header into the list `headers`, and return it."""
    headers[shard] = confirmed(headers[shard])
    return headers[shard]


def _first_samples(headers: Sequence[ShardHeader], seq_length: int) -> list[int]:
    """Return the number of the first sample of each shard. The last element is the number of
    samples of all shards."""
    return [0, *accumulate((header.tokens - 1) // seq_length for header in headers)]


Address = tuple[int, int, int]  # number of a dataset, shard in the dataset, token in the shard


class Dataset:
    """A directory of shards that were made with one tokenizer, as a sequence of training samples.

    A sample is seq_length + 1 consecutive tokens of one shard. The first seq_length tokens are the
    inputs, and the last seq_length tokens are the labels. Sample j of a shard starts at token j *
    seq_length. If SUMMARY lists the shards, only the first shard is opened at once. Every other
    shard is opened when one of its samples is first read.
    """

    def __init__(self, directory: str | Path, use_mmap: bool = True, *, verified: bool = False):
        """Find the shards of a directory, and check that their headers agree.

        If `use_mmap` is False, tokens are read by the system call pread, which is better on file
        systems on which memory mapping is slow. If `verified` is True, reading raises InputError
        for tokens of a damaged block (see `blocks`), and for damaged weights and document offsets.
        Raise InputError if shards differ in tokenizer, vocabulary size, eod_id, length of rows or
        pairs. Also raise the same errors as `find_headers`.
        """
        self.directory = Path(directory)
        self._verified = verified
        # (shard, part) for each part of a shard whose checksum was verified
        self._sound: set[tuple[int, str]] = set()
        self.headers = find_headers(directory)
        first = self.headers[0]
        for header in self.headers:
            for name in ("tokenizer_sha256", "vocab_size", "eod_id", "row_length", "pairs"):
                if getattr(header, name) != getattr(first, name):
                    raise InputError(
                        f"shard {header.path} has {name} {getattr(header, name)}, but {first.path} "
                        f"has {getattr(first, name)}: all shards of a dataset must have the same"
                    )
        self.tokenizer = first.tokenizer
        self.tokenizer_sha256 = first.tokenizer_sha256
        self.vocab_size = first.vocab_size
        self.eod_id = first.eod_id
        # the length of the rows into which documents are packed; 0: the shards have no rows and no
        # weights
        self.row_length = first.row_length
        self.pairs = first.pairs  # the documents of a row form pairs of answers
        self.token_count = sum(header.tokens for header in self.headers)
        self.dtype = max((header.dtype for header in self.headers), key=lambda kind: kind.itemsize)
        # The cached functions do not refer to this object. If they did, object and functions would
        # refer to each other, and the files would stay open until a later garbage collection.
        headers = self.headers
        self.shard_tokens: Callable[[int], Tokens] = lru_cache(_open_limit(len(headers)))(
            lambda shard: _open_tokens(_confirm(headers, shard), use_mmap, verified)
        )
        self._first_samples = lru_cache(4)(partial(_first_samples, headers))

    @property
    def sha256(self) -> str:
        """Return a SHA-256 hash of the headers of the shards, which contain the checksums."""
        return headers_sha256(self.headers)

    def samples(self, seq_length: int) -> int:
        """Return the number of samples of `seq_length` + 1 tokens. Raise InputError if no shard has
        so many tokens."""
        count = self._first_samples(seq_length)[-1]
        if count == 0:
            longest = max(header.tokens for header in self.headers)
            raise InputError(
                f"dataset {self.directory} is shorter than one sequence: its longest shard has "
                f"{longest} tokens, seq_length {seq_length} needs {seq_length + 1}"
            )
        return count

    def places(self, sample_indices: np.ndarray, seq_length: int) -> np.ndarray:
        """Return for each sample (int [n]) the number of its shard, and the position of its first
        token in the shard: int64 [2, n]. Raise IndexError for a sample that does not exist."""
        firsts = np.array(self._first_samples(seq_length))
        indices = np.asarray(sample_indices, dtype=np.int64)
        if indices.size and not 0 <= indices.min() <= indices.max() < firsts[-1]:
            raise self._no_sample(firsts[-1])
        shards = np.searchsorted(firsts, indices, side="right") - 1
        return np.stack([shards, (indices - firsts[shards]) * seq_length])

    def _no_sample(self, count: int) -> IndexError:
        return IndexError(f"sample outside [0, {count}) of dataset {self.directory}")

    def read(self, sample_indices: np.ndarray, seq_length: int) -> np.ndarray:
        """Return the tokens of samples (int [n]) as int64 [n, seq_length + 1]. Raise the same
        errors as `places` and `gather`."""
        firsts = self._first_samples(seq_length)
        places = []
        # This loop computes the same positions as the method `places`, but with plain integers. For
        # a few samples, numpy would take longer than reading the samples.
        for sample in sample_indices.tolist():
            if not 0 <= sample < firsts[-1]:
                raise self._no_sample(firsts[-1])
            shard = bisect_right(firsts, sample) - 1
            places.append((0, shard, (sample - firsts[shard]) * seq_length))
        return gather([self], places, seq_length + 1)

    def weights(self, shard: int) -> np.ndarray:
        """Return the weight of each token of shard number `shard`, uint8 [tokens]: 1 if the token
        counts as a label, and otherwise 0. The dataset must consist of rows of packed documents,
        because only their shards store weights.

        If the dataset is `verified`, the first call for a shard reads all its weights, and raises
        InputError if their checksum differs from the recorded one.
        """
        header = _confirm(self.headers, shard)
        weights = map_weights(header)
        self._require_sound(shard, "weights", weights, header.weights_checksum)
        return weights

    def documents(self, shard: int) -> np.ndarray:
        """Return the document offsets o of shard number `shard`, uint64 [documents + 1]: document i
        has the tokens [o[i], o[i+1]).

        If the dataset is `verified`, the first call for a shard reads all its offsets, and raises
        InputError if their checksum differs from the recorded one. Shards of older versions have no
        checksum of the offsets, so their offsets are not verified.
        """
        header = _confirm(self.headers, shard)
        offsets = map_documents(header)
        if header.documents_checksum:
            self._require_sound(shard, "document offsets", offsets, header.documents_checksum)
        return offsets

    def _require_sound(self, shard: int, part: str, values: np.ndarray, recorded: str) -> None:
        """Raise InputError if the dataset is `verified`, and a part of a shard has another checksum
        than the `recorded` one. Each part is verified only once, because callers may map the same
        part for many samples."""
        if self._verified and (shard, part) not in self._sound:
            path = self.headers[shard].path
            require_checksum(path, f"{part} have", _crc32(values), recorded)
            self._sound.add((shard, part))


def gather(datasets: Sequence[Dataset], places: Sequence[Address], width: int) -> np.ndarray:
    """Return the tokens [start, start + width) for each (number of the dataset, shard, start) in
    `places`, as int64 [n, width].

    Raise an InputError with shard, position and id for a token id outside the vocabulary of the
    first dataset. Rows are copied and checked in the type of the shards (uint16 or uint32), a few
    at a time, so that they stay in the processor's cache. They are converted to int64 last.
    """
    rows = np.empty((len(places), width), dtype=np.int64)
    # Convert a single row directly to int64. An additional copy in the narrow type would take half
    # as long as the read itself.
    if len(places) == 1:
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
        # check the tokens before they are converted to int64, because the check then reads only a
        # quarter or half of the bytes
        _check_ids(datasets, part, ready)
        rows[begin : begin + _READ_ROWS] = ready
    return rows


def _check_ids(datasets: Sequence[Dataset], places: Sequence[Address], tokens: np.ndarray) -> None:
    """Raise InputError if a token id is outside the vocabulary. `tokens` has one row for each
    element of `places`. If there is only one row, `tokens` may be 1-D."""
    size = datasets[0].vocab_size
    # to find the largest id, use argmax, which is numpy's fastest function that reads all ids
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
    weights = map_weights(header)
    checksum = 0
    for start in range(0, header.tokens, _VERIFY_TOKENS):
        piece = weights[start : start + _VERIFY_TOKENS]
        checksum = zlib.crc32(piece.data, checksum)
        if piece.max() > 1:
            at = int(np.argmax(piece > 1))
            return [f"{header.path}: token {start + at} has weight {piece[at]}; legal: 0 or 1"]
    actual = format_checksum(checksum)
    if actual != header.weights_checksum:
        return [f"{header.path}: weights' checksum {actual}, recorded {header.weights_checksum}"]
    return []


def _offset_problems(header: ShardHeader) -> list[str]:
    documents = map_documents(header)
    for start in range(0, header.documents, _VERIFY_TOKENS):
        piece = documents[start : start + _VERIFY_TOKENS + 1]
        wrong = np.flatnonzero(piece[1:] <= piece[:-1])
        if wrong.size:
            return [f"{header.path}: document {start + wrong[0]} does not end after its start"]
    actual = _crc32(documents)
    if header.documents_checksum not in ("", actual):
        recorded = header.documents_checksum
        return [f"{header.path}: document offsets' checksum {actual}, recorded {recorded}"]
    return []


def verify(path: str | Path) -> list[str]:
    """Read a shard completely, in bounded memory, and return its problems, one line each.

    `verify` checks the header and the checksums of tokens, weights and document offsets. For shards
    of older versions, which have no checksum of the offsets, this checksum is not checked. The
    function also checks that ids are inside the vocabulary, that weights are 0 or 1, and that
    document offsets ascend.
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
