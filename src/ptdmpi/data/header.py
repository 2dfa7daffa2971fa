"""The header of a shard: its sizes, offsets and attributes. The tokens are not part of the header.

The header is read from the shard's own file, or from the list that `ptdmpi-data` writes into the
folder of the shards. A shard is one HDF5 file with attributes and several datasets. The dataset
`tokens` (uint16 or uint32, little-endian) is contiguous and uncompressed. The dataset `documents`
is contiguous, and has uint64 offsets into `tokens`: the first is 0, and the last is the number of
tokens. A shard of format 2 also has a dataset `weights` (uint8, one per token: 1 if the token
counts as a label, 0 if it is only an input). The attribute `row_length` of a shard of format 2 is
the length of the rows into which its documents were packed. Format 3 is format 2 with pairs of
answers. Documents of a row are counted from 0: document 2 i ends with a preferred answer, and
document 2 i + 1 ends with another answer to the same prompt. If a row has an odd number of
documents, the last one is padding. `blocks.py` describes the dataset `token_blocks`.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from ptdmpi.base.disk import read_file
from ptdmpi.config import InputError
from ptdmpi.config.section import MOST

FORMAT_VERSION = 1
WEIGHTED_VERSION = 2  # the format version of shards with weights.
PAIRED_VERSION = 3  # the format version of shards with weights and with pairs of documents.
# The name of a file in the folder of shards. The file records from which texts the shards were
# made, and lists their headers.
SUMMARY = "tokenize.json"
# HDF5 stores the texts of attributes in heaps, which may be before, between or after the datasets
# of the file. In each of these places, the first bytes, up to this number, are searched for heaps
# (`_check_heaps`).
_HEAP_BYTES = 1 << 20


class _Kind(NamedTuple):
    """The type that an attribute of a shard must have: its type class in HDF5, the class of its
    value in h5py, and the name of the type in error messages."""

    stored: Any
    value: type[Any]
    name: str


_INTEGER = _Kind(h5py.h5t.TypeIntegerID, np.integer, "an integer")
_TEXT = _Kind(h5py.h5t.TypeStringID, str, "a text of variable length")
_ATTRIBUTES = {
    "format_version": _INTEGER,
    "vocab_size": _INTEGER,
    "eod_id": _INTEGER,
    "tokenizer": _TEXT,
    "tokenizer_sha256": _TEXT,
    "checksum": _TEXT,
}
# The additional attributes of format 2.
_WEIGHTED = {"row_length": _INTEGER, "weights_checksum": _TEXT}
# The attribute with the checksum of `documents`, which shards of older versions do not have.
_OFFSETS = {"documents_checksum": _TEXT}


@dataclass(frozen=True)
class ShardHeader:
    """The sizes, offsets and attributes of a shard, which can be read without its tokens."""

    path: Path
    tokens: int  # number of tokens
    dtype: np.dtype
    byte_offset: int  # offset of the first token in the file.
    documents: int  # number of documents.
    documents_byte_offset: int  # offset in the file of `documents`, which has documents + 1 numbers
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    eod_id: int
    checksum: str
    # offset of the first token's weight in the file; 0: no weights, all tokens count in the loss
    weights_byte_offset: int = 0
    row_length: int = 0  # number of tokens in a row of packed documents; 0: no rows
    weights_checksum: str = ""
    pairs: bool = False  # True if the documents of a row form pairs of answers.
    documents_checksum: str = ""  # "" if an older version of ptdmpi made the shard.
    # True if the header is from SUMMARY, and was not yet compared with the shard's file
    # (`confirmed`)
    listed: bool = False


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type for the token ids of a vocabulary: uint16 if all ids fit, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def _attributes(file: h5py.File) -> dict[str, Any]:
    """Return the attributes of a shard. Raise ValueError if an attribute is missing or illegal."""
    values: dict[str, Any] = {}
    # keep this object, because h5py makes a new object at each access of `attrs`
    attributes = file.attrs
    weighted = "weights" in file
    kinds = _ATTRIBUTES
    if weighted:
        kinds = kinds | _WEIGHTED
    if "documents_checksum" in attributes:
        kinds = kinds | _OFFSETS
    for name, kind in kinds.items():
        if name not in attributes:
            raise ValueError(f"has no attribute {name!r}")
        stored = attributes.get_id(name)
        # check the type of the attribute before its value is read, because HDF5 2.0 crashes on a
        # text whose type is damaged
        if stored.shape != () or not isinstance(stored.get_type(), kind.stored):
            raise ValueError(f"attribute {name!r} is not {kind.name}")
        value = attributes[name]
        if not isinstance(value, kind.value):
            raise ValueError(f"attribute {name!r} is {value!r}, not {kind.name}")
        values[name] = int(value) if kind is _INTEGER else value
    legal = (WEIGHTED_VERSION, PAIRED_VERSION) if weighted else (FORMAT_VERSION,)
    if values["format_version"] not in legal:
        raise ValueError(
            f"has format_version {values['format_version']}; this program reads {FORMAT_VERSION}, "
            f"and {WEIGHTED_VERSION} or {PAIRED_VERSION} with weights"
        )
    if weighted and not 0 < values["row_length"] <= MOST:
        raise ValueError(f"has rows of {values['row_length']} tokens; at least 1 is needed")
    if not 0 <= values["eod_id"] < values["vocab_size"] <= 1 << 32:
        raise ValueError(
            f"has eod_id {values['eod_id']} and vocab_size {values['vocab_size']}; "
            "0 <= eod_id < vocab_size <= 2^32 is needed"
        )
    return values


class _Extent(NamedTuple):
    """The position, length and type of a 1-D dataset in its file."""

    length: int
    dtype: np.dtype
    offset: int  # in bytes

    @property
    def stop(self) -> int:
        """Return the byte offset of the end of the dataset."""
        return self.offset + self.length * self.dtype.itemsize


def _extent(file: h5py.File, name: str, dtypes: tuple[str, ...]) -> _Extent:
    """Return the position, length and type of the 1-D contiguous dataset `name`. Raise TypeError if
    there is no dataset of this name. Raise ValueError if the type of the dataset is not in
    `dtypes`, if the dataset is empty, not 1-D or not contiguous, or if it is not completely inside
    the file."""
    data = file.get(name)
    if not isinstance(data, h5py.Dataset):
        raise TypeError(f"has no dataset {name!r}")
    dtype = data.dtype
    shape = data.shape
    if dtype.str not in dtypes:
        raise ValueError(f"dataset {name!r} has type {dtype.str}; legal: {', '.join(dtypes)}")
    if shape is None or len(shape) != 1 or shape[0] < 1:
        raise ValueError(f"dataset {name!r} has shape {shape}; one dim, not empty, is needed")
    offset = data.id.get_offset()
    if data.chunks is not None or data.compression is not None or data.external or offset is None:
        raise ValueError(f"dataset {name!r} must be contiguous, uncompressed and inside the file")
    extent = _Extent(shape[0], dtype, offset)
    size = os.path.getsize(file.filename)
    if extent.stop > size:
        raise ValueError(
            f"is truncated: dataset {name!r} ends at byte {extent.stop}, the file at {size}"
        )
    return extent


def _check_heaps(path: Path, datasets: list[_Extent]) -> None:
    """Raise ValueError if a global heap of the file contains an object that is larger than the rest
    of the heap. HDF5 2.0 would never stop reading a file with such a damaged heap. HDF5 stores the
    texts of attributes in heaps, before, between or after the datasets of the file.

    Source: HDF5 File Format Specification, III.E, "Disk Format: Level 1E - Global Heap".
    """
    datasets = sorted(datasets, key=lambda extent: extent.offset)
    gap_starts = [0, *(extent.stop for extent in datasets)]
    gap_ends = [*(extent.offset for extent in datasets), 1 << 62]
    with open(path, "rb") as stream:
        for start, end in zip(gap_starts, gap_ends, strict=True):
            content = os.pread(stream.fileno(), max(0, min(end - start, _HEAP_BYTES)), start)
            heap = content.find(b"GCOL")
            while heap >= 0:
                _check_heap(content, heap)
                heap = content.find(b"GCOL", heap + 4)


def _check_heap(content: bytes, heap: int) -> None:
    """Raise ValueError if an object in the heap at offset `heap` of `content` does not fit into the
    heap."""
    limit = heap + int.from_bytes(content[heap + 8 : heap + 16], "little")
    at = heap + 16
    while at + 16 <= min(limit, len(content)):
        size = int.from_bytes(content[at + 8 : at + 16], "little")
        free = content[at : at + 2] == b"\0\0"
        # `size` is the size of an object's content. Add the header (16 bytes) and the padding of
        # the object, except for free space, whose `size` includes the header.
        if not free:
            size = 16 + -(-size // 8) * 8
        if not 16 <= size <= limit - at:
            raise ValueError("has damaged texts in its attributes")
        at += size


def read_header(path: str | Path) -> ShardHeader:
    """Open a shard, validate its metadata, close it and return its header. The time of the call
    does not depend on the number of tokens in the shard.

    Raise InputError if the file does not exist, is not HDF5 or is truncated. Also raise InputError
    if a dataset or an attribute is missing, or has a wrong type, layout or version, and if the
    document offsets are impossible. The error message names the file, the mistake and the legal
    values.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"shard {path}: no such file")
    if not path.is_file():
        raise InputError(f"shard {path}: is not a file")
    try:
        with h5py.File(path, "r") as file:
            tokens = _extent(file, "tokens", ("<u2", "<u4"))
            documents = _extent(file, "documents", ("<u8",))
            datasets = [tokens, documents]
            weights_byte_offset = 0
            if "weights" in file:
                weights = _extent(file, "weights", ("|u1",))
                if weights.length != tokens.length:
                    raise ValueError(f"has {weights.length} weights for {tokens.length} tokens")
                datasets.append(weights)
                weights_byte_offset = weights.offset
            _check_heaps(path, datasets)
            values = _attributes(file)
        with open(path, "rb") as stream:
            first = int.from_bytes(os.pread(stream.fileno(), 8, documents.offset), "little")
            last = int.from_bytes(os.pread(stream.fileno(), 8, documents.stop - 8), "little")
    # h5py raises any of these exceptions for a damaged file, depending on the message of its C
    # library
    except (OSError, KeyError, TypeError, RuntimeError, ValueError, UnicodeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"shard {path}: {reason}; is it a shard of ptdmpi-data?") from error
    if documents.length < 2 or first != 0 or last != tokens.length:
        raise InputError(
            f"shard {path}: {documents.length} document offsets from {first} to {last}; "
            f"they must run from 0 to the number of tokens, {tokens.length}"
        )
    return ShardHeader(
        path=path,
        tokens=tokens.length,
        dtype=tokens.dtype,
        byte_offset=tokens.offset,
        documents=documents.length - 1,
        documents_byte_offset=documents.offset,
        tokenizer=str(values["tokenizer"]),
        tokenizer_sha256=str(values["tokenizer_sha256"]),
        vocab_size=int(values["vocab_size"]),
        eod_id=int(values["eod_id"]),
        checksum=str(values["checksum"]),
        weights_byte_offset=weights_byte_offset,
        row_length=int(values.get("row_length", 0)),
        weights_checksum=str(values.get("weights_checksum", "")),
        pairs=values["format_version"] == PAIRED_VERSION,
        documents_checksum=str(values.get("documents_checksum", "")),
    )


def format_checksum(crc32: int) -> str:
    """Return the value of the attribute `checksum`, such as "crc32:1c291ca3", for zlib's CRC-32
    over the bytes of a dataset."""
    return f"crc32:{crc32:08x}"


def headers_sha256(headers: Iterable[ShardHeader]) -> str:
    """Return a SHA-256 hash that identifies the tokens of a dataset, without reading them.

    The hash covers the tokenizer, the sizes and the checksums of the shards, in the order of the
    shards, but not the paths and names of their files.
    """
    names = ("tokenizer_sha256", "vocab_size", "eod_id", "tokens", "documents", "checksum")
    digest = hashlib.sha256()
    for header in headers:
        values = [getattr(header, name) for name in names]
        if header.row_length:
            values += [header.row_length, header.weights_checksum]
        if header.pairs:
            values.append("pairs")
        digest.update(json.dumps(values).encode())
    return digest.hexdigest()


_DTYPES = {"<u2": np.dtype("<u2"), "<u4": np.dtype("<u4")}
_OWN = tuple(field.name for field in fields(ShardHeader) if field.name not in ("path", "listed"))
# fields that only headers of shards with weights have
_OPTIONAL = ("weights_byte_offset", "row_length", "weights_checksum")
_FIELDS = frozenset(_OWN) - _OFFSETS.keys()


def listing(headers: Iterable[ShardHeader]) -> dict[str, dict[str, int | str]]:
    """Return the entries of shards in SUMMARY, by the names of the shards' files."""
    return {header.path.name: _entry(header) for header in headers}


def _entry(header: ShardHeader) -> dict[str, int | str]:
    entry = {name: getattr(header, name) for name in _OWN}
    entry["dtype"] = header.dtype.str
    if not header.pairs:
        del entry["pairs"]
    if not header.documents_checksum:
        del entry["documents_checksum"]
    if not header.row_length:
        for name in _OPTIONAL:
            del entry[name]
    return entry


def _listed(path: Path, entry: dict[str, Any]) -> ShardHeader:
    """Return the header that an entry of SUMMARY describes. Raise ValueError or KeyError if the
    entry is damaged."""
    with_weights = _FIELDS - {"pairs"}  # SUMMARY lists `pairs` only for shards in which it is True
    names = entry.keys() - _OFFSETS.keys()
    if names not in (_FIELDS, with_weights, with_weights - {*_OPTIONAL}):
        raise ValueError("its fields are not the fields of a header")
    numbers = (entry["byte_offset"], entry["documents_byte_offset"], entry["eod_id"])
    named = ("tokens", "documents", "vocab_size", "row_length", "weights_byte_offset")
    # each of these numbers must be at least 1
    counts = tuple(entry[name] for name in named if name in entry)
    if entry.get("pairs", True) is not True:
        raise ValueError("pairs is not true")
    if set(map(type, numbers + counts)) != {int} or min(numbers) < 0 or min(counts) < 1:
        raise ValueError("a number is missing or too small")
    return ShardHeader(path=path, listed=True, **{**entry, "dtype": _DTYPES[entry["dtype"]]})


def listed_headers(directory: Path) -> dict[str, ShardHeader | None]:
    """Return the headers that SUMMARY lists, by the names of the shards' files. The result is empty
    if there is no SUMMARY.

    With SUMMARY, a program reads one file at its start, however many shards there are, and opens a
    shard only when it first reads the shard (`confirmed`). A header is None if SUMMARY lists only
    the name of the shard, as in files that older versions of ptdmpi wrote. Raise InputError if
    SUMMARY cannot be read or is damaged.
    """
    path = directory / SUMMARY
    try:
        shards = json.loads(read_file(path))["shards"]
        if isinstance(shards, list):
            return dict.fromkeys(map(str, shards))
        return {name: _listed(directory / name, entry) for name, entry in shards.items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path}: is not a list of shards by ptdmpi-data ({type(error).__name__}: {error}); "
            "remove it, and the header of each shard is read instead"
        ) from error


def confirmed(header: ShardHeader) -> ShardHeader:
    """Return the header that is read from the shard's own file.

    If `header` was read from the file, return it unchanged. Raise InputError if the header in the
    shard's file differs from `header`, which means that the file was replaced. Also raise the same
    errors as `read_header`.
    """
    if not header.listed:
        return header
    own = read_header(header.path)
    for name in _OWN:
        if getattr(own, name) != getattr(header, name):
            raise InputError(
                f"shard {header.path} has {name} {getattr(own, name)}, but {SUMMARY} in the same "
                f"folder says {getattr(header, name)}: one of the two was replaced; remove "
                f"{header.path.with_name(SUMMARY)} to use the shards as they are"
            )
    return own
