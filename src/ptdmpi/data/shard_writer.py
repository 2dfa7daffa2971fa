"""Writing token shards as a stream. A writer needs little memory, writes every token only once, and
leaves no incomplete shard.

HDF5 needs the length of a contiguous dataset before its data, but a stream knows the length only at
its end. The writer therefore first makes an empty HDF5 file, and then appends the tokens by plain
writes, at the offset where HDF5 will place the first dataset. At the end HDF5 makes a dataset of
the right length at this offset, without writing its content. The writer finds the offset in
advance, by making such a dataset in an empty HDF5 file in memory. When the real dataset is made,
the writer checks that HDF5 has used the same offset.
"""

import io
import re
import zlib
from array import array
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import h5py
import numpy as np

from ptdmpi.base.disk import put_in_place, start_writing_out
from ptdmpi.config import InputError
from ptdmpi.data.blocks import BLOCKS, BlockSums
from ptdmpi.data.header import (
    FORMAT_VERSION,
    PAIRED_VERSION,
    WEIGHTED_VERSION,
    format_checksum,
    token_dtype,
)

# Tokens start at a page boundary, after the HDF5 structures of an empty file, which take less than
# 1 KiB.
_ALIGNMENT_BYTES = 4096
# The number of tokens that are checked, added to the checksum and written together. This number of
# tokens fits into the processor's cache, so the tokens are read from memory only once.
_PIECE_TOKENS = 1 << 17
# If tokens have a wider type than the shard, this number of tokens is checked and converted at a
# time, so that the tokens stay in the processor's cache.
_STEP_TOKENS = 1 << 15
_FEW_ENDS = 16  # if a block has fewer document ends, plain integers are faster than numpy.
# Each time that this number of bytes was written to the file, the kernel is asked to write these
# bytes to the disk.
_OUT_BYTES = 1 << 23


def _open_hdf5(path: Path | str, **options: object) -> h5py.File:
    """Open an HDF5 file in which each new object starts at a page boundary, so that the offset of
    `tokens` is known in advance."""
    return h5py.File(path, alignment_threshold=1, alignment_interval=_ALIGNMENT_BYTES, **options)


def _create_tokens(file: h5py.File, tokens: int, dtype: np.dtype) -> int:
    """Make the dataset `tokens` for `tokens` tokens, without writing its bytes. Return the byte
    offset of the dataset in the file."""
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_layout(h5py.h5d.CONTIGUOUS)
    # allocate the dataset now: otherwise HDF5 would choose the position when it first writes to the
    # dataset, but HDF5 never writes to this dataset
    plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    # store no times, so that the same tokens always give the same bytes
    plan.set_obj_track_times(False)
    kind = h5py.h5t.py_create(dtype)
    space = h5py.h5s.create_simple((tokens,))
    return h5py.h5d.create(file.id, b"tokens", kind, space, plan).get_offset()


def _tokens_offset() -> int:
    """Return the offset at which HDF5 places `tokens` in a file that `ShardWriter` has begun. To
    find the offset, the function begins a shard in a file in memory."""
    with _open_hdf5("probe", mode="w", driver="core", backing_store=False) as file:
        return _create_tokens(file, 1, np.dtype("<u2"))


class ShardWriter:
    """A context manager that writes one shard as a stream: first to `PATH.tmp`, which is renamed to
    PATH at the end.

    Only a complete, synced shard ever has the name PATH. The temporary file is removed if the
    `with` block raises an exception, or if a write fails. The writer needs memory for one buffer,
    and 8 bytes per document. For a shard with rows, the writer also needs one byte per token.

    The methods of `ShardWriter` raise InputError if the file cannot be written, for example on a
    full disk. They also raise InputError for a token id outside the vocabulary. A later call may
    raise this error, because short blocks of tokens are collected in a buffer before they are
    checked. `close` also raises InputError if the shard would be empty, or if its last document has
    no end.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: str,
        tokenizer_sha256: str,
        *,
        vocab_size: int,
        eod_id: int,
        row_length: int = 0,
        pairs: bool = False,
    ):
        """Begin the shard `path`. If `row_length` is above 0, documents are packed into rows of
        that length, and tokens have weights (`write_row`). If `pairs` is True, the documents of a
        row form pairs of answers."""
        self.path = Path(path)
        self.tokens = 0  # number of tokens written so far
        self._temporary = self.path.with_name(self.path.name + ".tmp")
        self._attributes = {
            "format_version": FORMAT_VERSION,
            "tokenizer": tokenizer,
            "tokenizer_sha256": tokenizer_sha256,
            "vocab_size": vocab_size,
            "eod_id": eod_id,
        }
        # one byte per token: 1 if the token counts as a label, otherwise 0; empty for a shard
        # without rows
        self._weights = bytearray()
        if row_length:
            version = PAIRED_VERSION if pairs else WEIGHTED_VERSION
            self._attributes |= {"format_version": version, "row_length": row_length}
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._ends = array("Q", [0])
        self._gathered = np.empty(_PIECE_TOKENS, self._dtype)
        self._filled = 0  # number of tokens in `_gathered` that are not yet written
        self._crc32 = 0
        self._blocks = BlockSums()
        self._offset = self._out = _tokens_offset()
        try:
            _open_hdf5(self._temporary, mode="w").close()
            # pieces are larger than the buffer of this stream, so the stream writes them without a
            # copy
            self._stream = io.BufferedWriter(io.FileIO(self._temporary, "r+"))
            self._stream.seek(self._offset)
        except OSError as error:
            self._discard()
            raise self._failure(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def write_row(self, tokens: np.ndarray, document_ends: np.ndarray, weights: np.ndarray) -> None:
        """Append tokens (int [n]) to a shard with rows, as `write` does. `weights` (bool [n]) is
        True for each token that counts as a label."""
        self._weights += weights.astype(np.uint8).tobytes()
        self.write(tokens, document_ends)

    def write(self, tokens: np.ndarray, document_ends: np.ndarray) -> None:
        """Append the tokens `tokens` (int [n]) to the shard.

        `document_ends` (int [k], ascending, in 1..n) counts from the first token of this block. A
        document that has no end in this block continues in the next block.
        """
        if tokens.size == 0:
            return
        # for few document ends, plain Python integers take a third of the time that numpy takes
        if document_ends.size < _FEW_ENDS:
            self._ends.extend([self.tokens + end for end in document_ends.tolist()])
        else:
            self._ends.frombytes((document_ends + self.tokens).astype(np.uint64).tobytes())
        self.tokens += tokens.size
        if tokens.size <= _STEP_TOKENS:
            self._gather(tokens)
        elif tokens.dtype == self._dtype:
            self._write_gathered()
            for start in range(0, tokens.size, _PIECE_TOKENS):
                self._write_piece(np.ascontiguousarray(tokens[start : start + _PIECE_TOKENS]))
        else:
            for start in range(0, tokens.size, _STEP_TOKENS):
                self._gather(tokens[start : start + _STEP_TOKENS])

    def _gather(self, tokens: np.ndarray) -> None:
        """Convert at most _STEP_TOKENS tokens to the shard's type, and append them to the buffer of
        tokens that are not yet written."""
        if tokens.dtype != self._dtype:
            # check the ids before the conversion to a narrower type cuts off bits
            self._check_ids(tokens)
        if self._filled + tokens.size > _PIECE_TOKENS:
            self._write_gathered()
        stop = self._filled + tokens.size
        self._gathered[self._filled : stop] = tokens
        self._filled = stop

    def _write_gathered(self) -> None:
        if self._filled:
            self._write_piece(self._gathered[: self._filled])
            self._filled = 0

    def _check_ids(self, tokens: np.ndarray) -> None:
        """Raise InputError for an id outside the vocabulary, after removing the temporary file."""
        # if ids are read as unsigned integers, negative ids are larger than all legal ids
        unsigned = tokens.view(f"{tokens.dtype.byteorder}u{tokens.itemsize}")
        if unsigned.item(unsigned.argmax()) >= self._vocab_size:
            wrong = int(tokens.min())
            if wrong >= 0:
                wrong = int(tokens.max())
            self.discard()
            raise InputError(
                f"shard {self.path}: token id {wrong} is outside the vocabulary of "
                f"{self._vocab_size}"
            )

    def _write_piece(self, piece: np.ndarray) -> None:
        """Check and write tokens that have the shard's type."""
        self._check_ids(piece)
        self._crc32 = zlib.crc32(piece.data, self._crc32)
        self._blocks.add(piece)
        try:
            self._stream.write(piece.data)
            at = self._stream.tell()
            if at >= self._out + _OUT_BYTES:
                start_writing_out(self._stream, self._out, at)
                self._out = at
        except OSError as error:
            self.discard()
            raise self._failure(error) from error

    def close(self) -> None:
        """Complete the shard's temporary file, sync it, and give it the name PATH."""
        self._write_gathered()
        documents = np.asarray(self._ends).astype("<u8", copy=False)
        if self.tokens == 0 or documents[-1] != self.tokens:
            self.discard()
            raise InputError(f"shard {self.path}: no tokens, or no end of the last document")
        try:
            self._stream.close()
            with _open_hdf5(self._temporary, mode="r+") as file:
                offset = _create_tokens(file, self.tokens, self._dtype)
                file.create_dataset("documents", data=documents)
                file.attrs["documents_checksum"] = format_checksum(zlib.crc32(documents.data))
                file.create_dataset(BLOCKS, data=self._blocks.values())
                if self._weights:
                    weights = np.frombuffer(self._weights, np.uint8)
                    file.create_dataset("weights", data=weights)
                    file.attrs["weights_checksum"] = format_checksum(zlib.crc32(weights.data))
                file.attrs.update(self._attributes, checksum=format_checksum(self._crc32))
            if offset != self._offset:
                raise AssertionError(f"HDF5 placed the tokens at {offset}, not at {self._offset}")
            put_in_place(self._temporary, self.path)
        # if a write fails, HDF5 raises OSError or RuntimeError
        except (OSError, RuntimeError) as error:
            self.discard()
            raise self._failure(error) from error

    def discard(self) -> None:
        """Close and remove the temporary file."""
        # closing the stream writes its buffer, and this write may fail, for example on a full disk
        with suppress(OSError):
            self._stream.close()
        self._discard()

    def _discard(self) -> None:
        self._temporary.unlink(missing_ok=True)

    def _failure(self, error: Exception) -> InputError:
        """Return an InputError with the reason of a failed write: the system's message in the error
        of HDF5, or the first line of the error if there is no such message."""
        text = str(error)  # the message of HDF5 lists nested calls, down to the call that failed
        reason = text.partition("\n")[0]
        if match := re.search(r"error message = '([^']+)'", text):
            reason = match[1]
        return InputError(
            f"shard {self.path} cannot be written: {reason}; free disk space, or use another disk"
        )
