"""Megatron-LM's indexed datasets: `PREFIX.bin` contains the tokens, and `PREFIX.idx` contains the
positions of the sequences.

The index of S sequences and D documents consists of these fields, all little-endian:

- `MMIDIDX` and two zero bytes
- uint64: the version, which is 1
- uint8: a code for the type of a token
- uint64: S
- uint64: D + 1, the number of document bounds
- int32 [S]: the lengths of the sequences in tokens
- int64 [S]: the byte offsets of the sequences in the .bin file
- int64 [D + 1]: the document bounds, which are sequence numbers from 0 to S

In a dataset for GPT, a document is usually one sequence. In a dataset for BERT, a document has one
sequence per sentence. Source: megatron/core/datasets/indexed_dataset.py, `_IndexWriter`.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ptdmpi.base.disk import put_in_place
from ptdmpi.base.lock import FileLock
from ptdmpi.config import InputError
from ptdmpi.data.header import ShardHeader, confirmed
from ptdmpi.data.shards import Dataset, map_documents, map_tokens

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = (6, 7)
_CODES = {"<u2": 8, "<i4": 4}
BLOCK_TOKENS = 1 << 20
# Number of sequences whose positions are read at a time. A document with more sequences is read as
# a whole.
_WINDOW_SEQUENCES = 1 << 18
_MAX_LENGTH = (1 << 31) - 1  # maximum tokens in a sequence, because its length is an int32


def bin_path(prefix: Path) -> Path:
    """Return the path of the file with the tokens. Raise InputError if `prefix` has no file
    name."""
    return _with_suffix(prefix, ".bin")


def idx_path(prefix: Path) -> Path:
    """Return the path of the file with the index. Raise InputError if `prefix` has no file name."""
    return _with_suffix(prefix, ".idx")


def _with_suffix(prefix: Path, suffix: str) -> Path:
    if prefix.name in ("", ".."):
        raise InputError(f"{prefix}: is not a PREFIX; give the name of a file, without .bin")
    return prefix.with_name(prefix.name + suffix)


@dataclass(frozen=True)
class TokenBlock:
    """The tokens of complete documents, or of one piece of a document with more than BLOCK_TOKENS
    tokens."""

    tokens: np.ndarray
    # The length of each document in tokens, int64 [documents]. If the block is a piece of one
    # document: the length of this piece, int64 [1].
    lengths: np.ndarray
    first: bool  # True if the first document of the block begins in this block
    last: bool  # True if the last document of the block ends in this block


class _Places(NamedTuple):
    """The positions of some sequences, as two arrays int64 [sequences]. `starts` is the index of
    each sequence's first token among all tokens of the .bin file, and `lengths` is its length in
    tokens."""

    starts: np.ndarray
    lengths: np.ndarray


class MegatronIndex:
    """An opened indexed dataset. The index and the tokens are memory-mapped, so only the parts that
    are used are read from the disk."""

    def __init__(self, prefix: Path):
        """Open PREFIX.bin and PREFIX.idx. Raise InputError for files that are missing, of another
        kind or version, or truncated."""
        self.prefix = prefix
        self.path = idx_path(prefix)
        for path in (self.path, bin_path(prefix)):
            if not path.is_file():
                raise InputError(f"{path}: no such file; a Megatron dataset is PREFIX.bin, .idx")
        with open(self.path, "rb") as stream:
            header = stream.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise self._failure("is not an index of Megatron (it does not begin with MMIDIDX)")
        _, version, code, sequences, bounds = _HEADER.unpack(header)
        if version != 1:
            raise self._failure(f"has version {version}; legal: 1")
        if code in _FLOATS:
            raise self._failure("has floating-point numbers; legal: integers")
        if code not in _TYPES:
            raise self._failure(f"has unknown type {code}; legal: integers")
        self.dtype = np.dtype(_TYPES[code])
        self.bin_bytes = bin_path(prefix).stat().st_size
        size = self.path.stat().st_size
        whole = _HEADER.size + 12 * sequences + 8 * bounds
        if size != whole:
            raise self._failure(f"has {size} bytes; {sequences} sequences need {whole}")
        if bounds < 2 or sequences < 1:
            raise self._failure("has no document")
        self.lengths = self._map("<i4", _HEADER.size, sequences)
        self.offsets = self._map("<i8", _HEADER.size + 4 * sequences, sequences)
        self.bounds = self._map("<i8", _HEADER.size + 12 * sequences, bounds)
        if self.bounds[0] != 0 or self.bounds[-1] != sequences:
            raise self._failure(
                f"has documents from sequence {self.bounds[0]} to {self.bounds[-1]}; "
                f"they must run from 0 to {sequences}"
            )
        count = self.bin_bytes // self.dtype.itemsize
        self.tokens = np.empty(0, self.dtype)
        if count:  # an empty file cannot be mapped into memory
            mapped = np.memmap(bin_path(prefix), self.dtype, "r", 0, (count,))
            self.tokens = mapped.view(np.ndarray)

    def _map(self, dtype: str, offset: int, count: int) -> np.ndarray:
        """Return one of the arrays in the index file, mapped into memory: `count` numbers of the
        type `dtype`, which begin at byte `offset`."""
        # map the index as bytes, because its arrays are not aligned to their element size
        raw = np.memmap(self.path, np.uint8, "r", offset, (count * np.dtype(dtype).itemsize,))
        return raw.view(np.ndarray).view(dtype)

    def _failure(self, reason: str) -> InputError:
        return InputError(f"{self.path}: {reason}")

    def _places(self, start: int, stop: int) -> _Places:
        """Return the positions of the sequences [start, stop). Raise InputError if a sequence is
        not completely inside the .bin file."""
        lengths = self.lengths[start:stop].astype(np.int64)
        offsets = self.offsets[start:stop].astype(np.int64)
        width = self.dtype.itemsize
        wrong = (lengths < 0) | (offsets < 0) | (offsets % width != 0)
        wrong |= offsets > self.bin_bytes - lengths * width
        if wrong.any():
            at = int(np.argmax(wrong))
            raise self._failure(
                f"sequence {start + at} has {lengths[at]} tokens of {width} bytes at byte "
                f"{offsets[at]} of {bin_path(self.prefix).name}, which has {self.bin_bytes} bytes"
            )
        return _Places(offsets // width, lengths)

    def _windows(self) -> Iterator[np.ndarray]:
        """Yield the document bounds of the index in consecutive windows. The last bound of a window
        is also the first bound of the next one. Raise InputError for bounds that are not sorted or
        are too large."""
        start = 0
        documents = len(self.bounds) - 1
        while start < documents:
            window = self.bounds[start : start + _WINDOW_SEQUENCES + 1].astype(np.int64)
            wrong = np.flatnonzero(window[1:] < window[:-1])
            if wrong.size or window[-1] > len(self.lengths):
                at = start + int(next(iter(wrong), len(window) - 2))
                raise self._failure(f"document {at} ends before its start, or after all sequences")
            fitting = int(np.searchsorted(window, window[0] + _WINDOW_SEQUENCES, "right"))
            window = window[: max(2, fitting)]
            yield window
            start += len(window) - 1

    def blocks(self) -> Iterator[TokenBlock]:
        """Yield all documents, in order, in blocks of at most BLOCK_TOKENS tokens.

        The blocks depend only on the documents, not on the division of the documents into sequences
        or on the order of the sequences in the .bin file. Raise InputError for impossible lengths,
        offsets and bounds.
        """
        for window in self._windows():
            base = int(window[0])
            starts, lengths = self._places(base, int(window[-1]))
            ends = np.concatenate([[0], np.cumsum(lengths)])[window - base]  # [documents + 1]
            done = 0
            while done < len(window) - 1:
                fitting = int(np.searchsorted(ends, ends[done] + BLOCK_TOKENS, "right")) - 1
                stop = max(done + 1, fitting)
                part = slice(int(window[done]) - base, int(window[stop]) - base)
                yield from self._block(np.diff(ends[done : stop + 1]), starts[part], lengths[part])
                done = stop

    def _block(
        self, documents: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> Iterator[TokenBlock]:
        """Yield one block of complete documents, or the blocks of a single longer document.
        `documents` are the lengths of the documents in tokens. `starts` and `lengths` are the
        positions of their sequences (see `_Places`)."""
        total = int(documents.sum())
        if total <= BLOCK_TOKENS:
            runs = [self.tokens[start:stop] for start, stop in _runs(starts, lengths)]
            tokens = runs[0] if len(runs) == 1 else np.concatenate([self.tokens[:0], *runs])
            yield TokenBlock(tokens, documents, True, True)
            return
        done = 0  # number of tokens of this document in earlier blocks
        parts = []
        waiting = 0  # number of tokens in `parts`
        for start, stop in _runs(starts, lengths):
            while start < stop:
                end = min(stop, start + BLOCK_TOKENS - waiting)
                parts.append(self.tokens[start:end])
                waiting += end - start
                start = end
                last = done + waiting == total
                if waiting == BLOCK_TOKENS or last:
                    tokens = np.concatenate(parts)
                    yield TokenBlock(tokens, np.array([waiting]), done == 0, last)
                    done += waiting
                    parts = []
                    waiting = 0


def _runs(starts: np.ndarray, lengths: np.ndarray) -> list[tuple[int, int]]:
    """Join sequences that follow each other without a gap in the file. Return a pair (first token,
    end) for each joined range of tokens."""
    full = lengths > 0
    starts = starts[full]
    lengths = lengths[full]
    if not starts.size:
        return []
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1])
    firsts = starts[np.concatenate([[0], breaks + 1])]
    lasts = np.concatenate([breaks, [starts.size - 1]])
    return list(zip(firsts.tolist(), (starts[lasts] + lengths[lasts]).tolist(), strict=True))


def _joined(headers: Sequence[ShardHeader], eod_id: int) -> list[bool]:
    """Return a bool for each shard, which is True if its first document continues the last document
    of the previous shard. `eod_id` is the id of the end-of-document token."""
    opens = [int(map_tokens(header)[-1]) != eod_id for header in headers]
    return [False, *opens[:-1]]


def _document_lengths(headers: Sequence[ShardHeader], eod_id: int) -> Iterator[np.ndarray]:
    """Yield the lengths of all documents, in tokens, as arrays int64 [documents]. A document that
    continues in the next shard counts as one document. Raise InputError for a document that is too
    long for Megatron."""
    carried = 0  # number of tokens of a document that continues in the next shard
    joined = [*_joined(headers, eod_id), False]
    for number, header in enumerate(headers):
        offsets = map_documents(header)
        for start in range(0, header.documents, BLOCK_TOKENS):
            piece = offsets[start : start + BLOCK_TOKENS + 1].astype(np.int64)
            lengths = np.diff(piece)
            lengths[0] += carried
            carried = 0
            if start + BLOCK_TOKENS >= header.documents and joined[number + 1]:
                carried = int(lengths[-1])
                lengths = lengths[:-1]
            if lengths.size and not 0 < lengths.min() <= lengths.max() <= _MAX_LENGTH:
                raise InputError(
                    f"{header.path}: has a document of {lengths.max()} tokens, or of 0; a "
                    f"sequence of Megatron has 1 to {_MAX_LENGTH}"
                )
            yield lengths


def _write_tokens(headers: Sequence[ShardHeader], dtype: np.dtype, path: Path) -> None:
    """Write the .bin file. Raise InputError for a token id that is outside the vocabulary or does
    not fit into `dtype`."""
    with open(path, "wb") as stream:
        for header in headers:
            tokens = map_tokens(header)
            for start in range(0, header.tokens, BLOCK_TOKENS):
                block = tokens[start : start + BLOCK_TOKENS]
                if block.max() >= header.vocab_size or block.max() > np.iinfo(dtype).max:
                    raise InputError(
                        f"{header.path}: token id {block.max()} is outside the vocabulary of "
                        f"{header.vocab_size}, or of Megatron's {dtype.name}"
                    )
                stream.write(np.ascontiguousarray(block, dtype))


def _write_index(headers: Sequence[ShardHeader], eod_id: int, dtype: np.dtype, path: Path) -> int:
    """Write the .idx file. Return the number of documents; each document is one sequence."""
    documents = sum(header.documents for header in headers) - sum(_joined(headers, eod_id))
    starts = [_HEADER.size, _HEADER.size + 4 * documents, _HEADER.size + 12 * documents]
    with open(path, "wb") as stream:
        code = _CODES[dtype.str]
        stream.write(_HEADER.pack(_MAGIC, 1, code, documents, documents + 1))
        done = offset = 0
        for lengths in _document_lengths(headers, eod_id):
            ends = offset + np.cumsum(lengths) * dtype.itemsize
            columns = (
                lengths.astype("<i4"),
                (ends - lengths * dtype.itemsize).astype("<i8"),
                np.arange(done, done + lengths.size, dtype="<i8"),
            )
            for start, column in zip(starts, columns, strict=True):
                stream.seek(start + done * column.itemsize)
                stream.write(column)
            done += lengths.size
            if ends.size:
                offset = int(ends[-1])
        stream.seek(starts[2] + 8 * done)
        stream.write(np.array([done], "<i8"))
    return documents


@contextmanager
def _alone(prefix: Path) -> Iterator[None]:
    """Return a context that holds the lock of a PREFIX. Raise InputError if another process holds
    the lock, or has just finished writing the files."""
    path = _with_suffix(prefix, ".lock")
    with FileLock(path) as lock:
        if not lock.take():
            raise InputError(
                f"{prefix}: {lock.holder()} is writing it; wait for its end, or choose another "
                "--output"
            )
        if not lock.still_there():
            raise InputError(f"{prefix}: another process has just finished it; run this again")
        try:
            yield
        finally:
            path.unlink()


def export(directory: Path, prefix: Path) -> dict[str, Any]:
    """Write a dataset as PREFIX.bin and PREFIX.idx. Each document is written as one sequence, which
    ends with the end-of-document token. Return the final table.

    The written tokens are uint16 if the tokens of the shards are uint16, otherwise int32. If a
    document was cut at the end of a shard, its parts are joined. Raise InputError for a directory
    that is not a dataset, for files that already exist, for a full disk, and for a document or an
    id that is too large. After an error, this function leaves no new file.
    """
    dataset = Dataset(directory)
    headers = [confirmed(header) for header in dataset.headers]
    dtype = max((header.dtype for header in headers), key=lambda kind: kind.itemsize)
    dtype = np.dtype("<u2" if dtype.itemsize == 2 else "<i4")
    paths = (bin_path(prefix), idx_path(prefix))
    temporary = [path.with_name(path.name + ".tmp") for path in paths]
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with _alone(prefix), ExitStack() as undo:
            for path in paths:
                if path.exists():
                    raise InputError(f"{path}: exists; remove it, or choose another --output")
            for path in temporary:
                undo.callback(path.unlink, missing_ok=True)
            _write_tokens(headers, dtype, temporary[0])
            documents = _write_index(headers, dataset.eod_id, dtype, temporary[1])
            put_in_place(temporary[0], paths[0])
            # if the next step fails, remove the .bin file, which is useless without the .idx file
            undo.callback(paths[0].unlink)
            put_in_place(temporary[1], paths[1])
            undo.pop_all()
    except OSError as error:
        raise InputError(f"{prefix}: cannot be written: {error}") from error
    return {
        "bin": str(paths[0]),
        "idx": str(paths[1]),
        "documents": documents,
        "tokens": dataset.token_count,
        "dtype": dtype.name,
    }
