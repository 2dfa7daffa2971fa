"""The data files of a checkpoint. The files contain slices (`Box`) of logical tensors, which are
the unsharded tensors of the model. The checksum of a slice is computed while the slice is written
or read.

Each file is a valid safetensors file (8 bytes of length, a JSON header, raw little-endian data), so
any tool can open it. This module writes the safetensors format itself for two reasons. First, this
module computes the checksums while it writes the data, not in a second pass over the file. Second,
it writes the data directly from the memory of the parameters. To read a slice of a tensor, a reader
takes the offset of the slice from the manifest, and reads only its bytes, directly into the array
that receives them.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from ptdmpi.base.box import Box
from ptdmpi.base.disk import start_writing_out
from ptdmpi.checkpoint.manifest import (
    CODES,
    SCALES,
    TYPE_NAMES,
    WEIGHTS,
    Manifest,
    StoredPiece,
    StoredTensor,
    Written,
)
from ptdmpi.config import InputError
from ptdmpi.plan.layer.low_bit import LowBit

# Data is written in chunks of this number of bytes. A chunk of this size stays in the processor's
# cache between the computation of its checksum and the write.
CHUNK_BYTES = 1 << 20
# The bytes that a rank needs from a file may have gaps between them. A gap of up to this number of
# bytes is read, too: the disk reads complete blocks anyway, so two read calls that skip the gap
# would not be faster. Larger gaps are skipped.
GAP_BYTES = 4096


Array = NDArray[Any]


class Damaged(Exception):
    """An error: bytes of a checkpoint are missing, or differ from the bytes that were written."""


@dataclass(frozen=True)
class Outgoing:
    """A slice of a logical tensor that will be written to a file. The function `values` returns the
    elements of the slice."""

    tensor: str
    shape: tuple[int, ...]
    box: Box
    dtype: str
    values: Callable[[], Array]

    @property
    def nbytes(self) -> int:
        """Return the size of the values in bytes."""
        return self.box.elements * np.dtype(self.dtype).itemsize


def header(parts: Sequence[tuple[str, str, Sequence[int]]]) -> bytes:
    """Return the header of a safetensors file with the tensors `parts` (key, dtype, shape), in this
    order. The header contains all bytes before the data. The length of the header is a multiple
    of 64 bytes."""
    table: dict[str, dict[str, Any]] = {}
    end = 0
    for key, dtype, shape in parts:
        start = end
        end += math.prod(shape) * np.dtype(dtype).itemsize
        table[key] = {
            "dtype": TYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, parts: Sequence[Outgoing]) -> Written:
    """Write one file, and wait until it is on the disk. Return the size of the file and its slices
    of tensors, for the manifest."""
    keys = [f"{part.tensor}#{number}" for number, part in enumerate(parts)]
    head = header([(k, p.dtype, p.box.size) for k, p in zip(keys, parts, strict=True)])
    offset = len(head)
    tensors: dict[str, StoredTensor] = {}
    with open(path, "xb") as file:
        file.write(head)
        for key, part in zip(keys, parts, strict=True):
            piece = StoredPiece(
                file=path.name,
                key=key,
                box=part.box,
                offset=offset,
                crc32=_write_block(file, part.values()),
            )
            known = tensors.get(part.tensor) or StoredTensor(part.shape, part.dtype, ())
            tensors[part.tensor] = replace(known, pieces=(*known.pieces, piece))
            offset += part.nbytes
        file.flush()
        # wait for the disk before the manifest names the file, because a rename may reach the disk
        # before the data
        os.fsync(file.fileno())
    return Written(path.name, offset, tensors)


def _write_block(file: BinaryIO, values: Array) -> int:
    data = np.ascontiguousarray(values).data.cast("B")
    crc = 0
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        crc = zlib.crc32(chunk, crc)
        file.write(chunk)
        end = file.tell()
        start_writing_out(file, max(0, end - 2 * CHUNK_BYTES), end)
    return crc


class Reader:
    """A reader of slices of logical tensors. A checkpoint stores each tensor in pieces. The slice
    that is read need not be one of these pieces.

    If a whole piece is read, the reader also compares the bytes with the checksum of the piece. The
    array `checked` has one entry for each piece in `pieces`: 1 if the piece was compared with its
    checksum, 0 if not. If a tensor is stored separately for each replica, `means` maps the tensor's
    name to the names of the stored tensors (`Manifest.means`). Reading the tensor then returns the
    mean of the stored tensors. Threads must not share a reader.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self.tensors = manifest.tensors
        self.pieces: list[tuple[str, StoredPiece]] = []
        self._first: dict[str, int] = {}
        for name, tensor in self.tensors.items():
            self._first[name] = len(self.pieces)
            self.pieces += [(name, piece) for piece in tensor.pieces]
        self.means = manifest.means
        self.checked = np.zeros(len(self.pieces), dtype=np.uint8)
        self.read_bytes = 0
        self._open: tuple[str, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def require(self, name: str, shape: Sequence[int]) -> None:
        """Raise InputError unless the checkpoint has the tensor `name` with this shape."""
        stored = self.manifest.find(name)
        state = "is missing"
        if stored is not None:
            if stored.shape == tuple(shape):
                return
            state = f"has shape {list(stored.shape)}"
        raise InputError(
            f"checkpoint {self.directory}: {name} {state}, this model needs {list(shape)}"
        )

    def read_whole(self, name: str, target: Array) -> None:
        """Fill `target`, which has the shape of the tensor `name`, with the whole tensor. Raise the
        same errors as `read`."""
        self.read(name, Box.whole(target.shape), target)

    def read(self, name: str, wanted: Box, target: Array) -> None:
        """Fill `target` with the slice `wanted` of tensor `name`, converted to the type of
        `target`.

        Raise Damaged if a file is missing, cannot be read or is too short, or if a checksum does
        not match.
        """
        if name in self.means:
            self._read_mean(self.means[name], wanted, target)
            return
        if name in self.manifest.in_few_bits:
            self._read_few_bits(name, wanted, target)
            return
        tensor = self.tensors[name]
        for number, piece in enumerate(tensor.pieces, self._first[name]):
            common = piece.box.overlap(wanted)
            if common is None:
                continue
            place = target[common.relative(wanted).index]
            direct = place.dtype == tensor.dtype and place.flags.c_contiguous
            values = place
            if not direct:
                values = np.empty(common.size, tensor.dtype)
            if common == piece.box:
                self._read_checked(piece, values)
                self.checked[number] = 1
            else:
                self._read_part(piece, common, values)
            if not direct:
                place[...] = values

    def _read_mean(self, names: Sequence[str], wanted: Box, target: Array) -> None:
        """Fill `target` with the slice `wanted` of the mean of the tensors `names`, one tensor for
        each replica. As in a training run, the tensors are summed in the order of the replicas, in
        their own data type, and the sum is divided by the number of replicas."""
        total = np.zeros(wanted.size, self.tensors[names[0]].dtype)
        own = np.empty_like(total)
        for name in names:
            self.read(name, wanted, own)
            total += own
        target[...] = total / total.dtype.type(len(names))

    def _read_few_bits(self, name: str, wanted: Box, target: Array) -> None:
        """Fill `target` with the slice `wanted` of a quantized weight, dequantized in float32. Each
        code stands for a number, its level. The value of an element is the level of its code times
        the scale of its block. If the quantized format stores the lowest value of each block, this
        value is added. Complete blocks are read, and the wanted elements are taken from these
        blocks.
        """
        form = self.manifest.form
        assert form is not None, "the manifest says what its codes are"
        top, left = wanted.start
        bottom, right = wanted.stop
        first = left // form.block
        last = -(-right // form.block)
        begin = first * form.block
        end = last * form.block
        per_byte = 8 // form.bits
        codes = Box((top, begin // per_byte), (bottom, end // per_byte))
        scales = Box((top, first * form.numbers), (bottom, last * form.numbers))
        code = np.empty(codes.size, np.uint8)
        scale = np.empty(scales.size, np.float32)
        plain = name.removeprefix(WEIGHTS)
        self.read(CODES + plain, codes, code)
        self.read(SCALES + plain, scales, scale)
        levels = _levels(form)[code].reshape(bottom - top, last - first, form.block)
        numbers = scale.reshape(bottom - top, last - first, form.numbers)
        values = levels * numbers[..., :1]
        if form.numbers == 2:
            values += numbers[..., 1:]
        target[...] = values.reshape(bottom - top, -1)[:, left - begin : right - begin]

    def check(self, number: int) -> None:
        """Read piece `number` of `pieces`, and compare it with its checksum. The values of the
        piece are not returned. Raise the same errors as `read`."""
        name, piece = self.pieces[number]
        left = self.tensors[name].nbytes(piece)
        scratch = memoryview(bytearray(min(left, CHUNK_BYTES)))
        crc = 0
        offset = piece.offset
        while left:
            part = scratch[: min(left, CHUNK_BYTES)]
            self._read_at(piece.file, offset, part)
            crc = zlib.crc32(part, crc)
            offset += len(part)
            left -= len(part)
        self._compare(piece, crc)

    def _read_checked(self, piece: StoredPiece, values: Array) -> None:
        data = values.data.cast("B")
        crc = 0
        for start in range(0, len(data), CHUNK_BYTES):
            part = data[start : start + CHUNK_BYTES]
            self._read_at(piece.file, piece.offset + start, part)
            crc = zlib.crc32(part, crc)
        self._compare(piece, crc)

    def _compare(self, piece: StoredPiece, crc: int) -> None:
        if crc != piece.crc32:
            raise Damaged(f"{self.directory / piece.file}: {piece.key} is damaged")

    def _read_part(self, piece: StoredPiece, common: Box, values: Array) -> None:
        """Read the part `common` of a piece into `values`. In the file, `common` consists of
        several runs of consecutive bytes. Small gaps between the runs are read, too; larger gaps
        are skipped."""
        sizes = piece.box.size
        inner = common.relative(piece.box)
        # `cut` is the last dim that is not read completely. For each index of the dims before
        # `cut`, the wanted bytes are consecutive.
        cut = max(k for k, size in enumerate(inner.size) if size < sizes[k])
        row = math.prod(sizes[cut + 1 :]) * values.itemsize
        run = inner.size[cut] * row
        gap = sizes[cut] * row - run
        data = values.data.cast("B")
        if gap > GAP_BYTES:
            for number, start in enumerate(_starts(inner, cut, sizes, values.itemsize)):
                at = piece.offset + start + inner.start[cut] * row
                self._read_at(piece.file, at, data[number * run : (number + 1) * run])
            return
        stride = math.prod(sizes[1:]) * values.itemsize
        scratch = np.empty((inner.size[0], *sizes[1:]), values.dtype)
        at = piece.offset + inner.start[0] * stride
        self._read_at(piece.file, at, scratch.data.cast("B"))
        values[...] = scratch[(slice(None), *inner.index[1:])]

    def _read_at(self, file: str, offset: int, target: memoryview) -> None:
        if self._open is None or self._open[0] != file:
            self.__exit__(None, None, None)
            try:
                # with O_NONBLOCK a path that is a pipe raises an error, instead of waiting for ever
                flags = os.O_RDONLY | os.O_NONBLOCK
                self._open = file, os.open(self.directory / file, flags)
                # ask the kernel to read the file in advance: the kernel then reads the next chunk
                # while this thread computes the checksum of the present chunk
                os.posix_fadvise(self._open[1], 0, 0, os.POSIX_FADV_SEQUENTIAL)
            except OSError as error:
                raise Damaged(f"{self.directory / file}: {error.strerror}") from None
        descriptor = self._open[1]
        done = 0
        while done < len(target):
            try:
                count = os.preadv(descriptor, [target[done:]], offset + done)
            except OSError as error:
                raise Damaged(f"{self.directory / file}: {error.strerror}") from None
            if count == 0:
                raise Damaged(f"{self.directory / file} is too short")
            done += count
        self.read_bytes += done


@cache
def _levels(form: LowBit) -> Array:
    """Return a table [256, elements per byte]: for each value of a byte, the quantization levels
    that this byte encodes. The lowest bits of a byte encode the first level."""
    levels = np.array(form.levels, np.float32)
    codes = np.arange(256)
    if form.bits == 8:
        return levels[codes, None]
    return np.stack((levels[codes & 15], levels[codes >> 4]), axis=1)


def _starts(inner: Box, dims: int, sizes: Sequence[int], itemsize: int) -> Iterator[int]:
    """Yield byte offsets in a piece of shape `sizes`. The slice `inner` selects a range of indices
    in each of the first `dims` dims. For each combination of selected indices, the function yields
    the offset of the first element with these indices.
    """
    strides = [math.prod(sizes[k + 1 :]) * itemsize for k in range(dims)]
    for index in np.ndindex(*inner.size[:dims]):
        places = zip(inner.start, index, strides, strict=False)
        yield sum((start + i) * stride for start, i, stride in places)
