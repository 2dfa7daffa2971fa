"""Writing token shards as a stream: bounded memory, every token written once, whole files or none.

HDF5 wants the length of a contiguous dataset before its data, a stream knows it only at the end. So
the tokens are appended to the file by plain writes, behind the still empty HDF5 structures, at the
offset where HDF5 will place the first dataset; at the end HDF5 is told to make a dataset of the
right length there, without filling it. The offset comes from asking HDF5 itself, and is checked
when it is used.
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
from ptdmpi.data.header import (
    FORMAT_VERSION,
    WEIGHTED_VERSION,
    format_checksum,
    token_dtype,
)

_ALIGNMENT_BYTES = (
    4096  # tokens start on a page, past the structures of an empty file (under 1 KiB)
)
_PIECE_TOKENS = 1 << 17  # checked, summed, written while they are in the processor's cache
_STEP_TOKENS = 1 << 15  # checked and converted likewise, where they come in a wider type
_FEW_ENDS = 16
_OUT_BYTES = 1 << 23  # so often the kernel is told to begin with the disk's part


def _open_hdf5(path: Path | str, **options: object) -> h5py.File:
    """Open so that each new object starts on a page: this alone makes the offset of `tokens`
    certain."""
    return h5py.File(path, alignment_threshold=1, alignment_interval=_ALIGNMENT_BYTES, **options)


def _create_tokens(file: h5py.File, tokens: int, dtype: np.dtype) -> int:
    """Make the dataset `tokens` without touching its bytes; its byte offset in the file."""
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_layout(h5py.h5d.CONTIGUOUS)
    # early: else HDF5 chooses the place when it first writes, and it never writes
    plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plan.set_obj_track_times(False)  # the same tokens give the same bytes
    kind, space = h5py.h5t.py_create(dtype), h5py.h5s.create_simple((tokens,))
    return h5py.h5d.create(file.id, b"tokens", kind, space, plan).get_offset()


def _tokens_offset() -> int:
    """Where HDF5 places `tokens` in a file that `ShardWriter` began: asked of a file in memory."""
    with _open_hdf5("probe", mode="w", driver="core", backing_store=False) as file:
        return _create_tokens(file, 1, np.dtype("<u2"))


class ShardWriter:
    """Context manager that writes one shard as a stream: `PATH.tmp` first, then renamed to PATH.

    Nothing but a whole, synced shard ever has the name PATH; when the block ends by an exception,
    or a write fails, the temporary file is removed. Memory: one buffer, 8 bytes per document, and
    one per token of a shard with rows.

    Raises InputError if the file cannot be written (a full disk, say), for a token id outside the
    vocabulary (in a later call where blocks are short: they are gathered), and for a shard that
    would be empty or whose last document has no end.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: str,
        tokenizer_sha256: str,
        vocab_size: int,
        eod_id: int,
        row_length: int = 0,
    ):
        """`row_length` above 0: of the rows that documents are packed in; tokens have weights."""
        self.path = Path(path)
        self.tokens = 0  # written so far
        self._temporary = self.path.with_name(self.path.name + ".tmp")
        self._attributes = {
            "format_version": FORMAT_VERSION,
            "tokenizer": tokenizer,
            "tokenizer_sha256": tokenizer_sha256,
            "vocab_size": vocab_size,
            "eod_id": eod_id,
        }
        self._weights = bytearray()  # one for each token, of a shard with rows
        if row_length:
            self._attributes |= {"format_version": WEIGHTED_VERSION, "row_length": row_length}
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._ends = array("Q", [0])
        self._gathered = np.empty(_PIECE_TOKENS, self._dtype)
        self._filled = 0  # so many of them are tokens
        self._crc32 = 0
        self._offset = self._out = _tokens_offset()
        try:
            _open_hdf5(self._temporary, mode="w").close()
            # pieces are larger than its buffer, so it passes them on without a copy
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
        """As `write`, of a shard with rows, with the weights (bool [n]) of the tokens as labels."""
        self._weights += weights.astype(np.uint8).tobytes()
        self.write(tokens, document_ends)

    def write(self, tokens: np.ndarray, document_ends: np.ndarray) -> None:
        """Append tokens (int [n]). `document_ends` (int [k], rising, in 1..n) counts from this
        block's first token; a document without an end in this block goes on in the next one."""
        if tokens.size == 0:
            return
        if document_ends.size < _FEW_ENDS:  # in plain integers that takes a third of the time
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
        """Put at most _STEP_TOKENS, in the shard's type, behind those that wait to be written."""
        if tokens.dtype != self._dtype:
            self._check_ids(tokens)  # while they have all their bits
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
        # negative ids are the largest of all if their bits are taken as unsigned
        unsigned = tokens.view(f"{tokens.dtype.byteorder}u{tokens.itemsize}")
        if unsigned.item(unsigned.argmax()) >= self._vocab_size:
            low, high = int(tokens.min()), int(tokens.max())
            self.discard()
            raise InputError(
                f"shard {self.path}: token id {low if low < 0 else high} is outside the vocabulary "
                f"of {self._vocab_size}"
            )

    def _write_piece(self, piece: np.ndarray) -> None:
        self._check_ids(piece)
        self._crc32 = zlib.crc32(piece.data, self._crc32)
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
        """Complete the file, sync it and give it its name."""
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
                if self._weights:
                    weights = np.frombuffer(self._weights, np.uint8)
                    file.create_dataset("weights", data=weights)
                    file.attrs["weights_checksum"] = format_checksum(zlib.crc32(weights.data))
                file.attrs.update(self._attributes, checksum=format_checksum(self._crc32))
            if offset != self._offset:
                raise AssertionError(f"HDF5 placed the tokens at {offset}, not at {self._offset}")
            put_in_place(self._temporary, self.path)
        except (OSError, RuntimeError) as error:  # HDF5 reports a failed write as either
            self.discard()
            raise self._failure(error) from error

    def discard(self) -> None:
        """Close and remove the temporary file."""
        with suppress(OSError):  # flushing what is thrown away may fail again, as on a full disk
            self._stream.close()
        self._discard()

    def _discard(self) -> None:
        self._temporary.unlink(missing_ok=True)

    def _failure(self, error: Exception) -> InputError:
        text = str(error)  # HDF5 tells the whole way down to the call that failed
        reason = re.search(r"error message = '([^']+)'", text)
        short = reason[1] if reason else text.partition("\n")[0]
        return InputError(
            f"shard {self.path} cannot be written: {short}; free space or choose another place"
        )
