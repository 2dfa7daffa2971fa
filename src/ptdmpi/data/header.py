"""The header of a shard: what is known of it without reading its tokens, from the file itself or
from the list that `ptdmpi-data` leaves beside the shards.

A shard is one HDF5 file with a contiguous, uncompressed dataset `tokens` (uint16 or uint32,
little-endian), a contiguous dataset `documents` (uint64 offsets into `tokens`: first 0, last the
number of tokens) and attributes. One of format 2 has a dataset `weights` besides (uint8, one for
each token: 1 where it counts as a label, 0 where it is only read) and the length of the rows that
its documents were packed in.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ptdmpi.config import InputError
from ptdmpi.config.section import MOST

FORMAT_VERSION = 1
WEIGHTED_VERSION = 2  # of shards with weights
SUMMARY = "tokenize.json"  # what was made of what, and the headers of the shards beside it
_HEAP_BYTES = 1 << 20  # looked at in each place where HDF5 keeps the texts of attributes
_INTEGERS = ("format_version", "vocab_size", "eod_id")
_TEXTS = ("tokenizer", "tokenizer_sha256", "checksum")
# Of format 2 besides.
_WEIGHTED = ("row_length", "weights_checksum")
# HDF5's type of an attribute, h5py's, and its name; of texts: True
_KINDS: dict[bool, tuple[Any, type[Any], str]] = {
    False: (h5py.h5t.TypeIntegerID, np.integer, "integer"),
    True: (h5py.h5t.TypeStringID, str, "text of variable length"),
}


@dataclass(frozen=True)
class ShardHeader:
    """What is known of a shard without reading its tokens."""

    path: Path
    tokens: int  # number of tokens
    dtype: np.dtype
    byte_offset: int  # of the first token in the file
    documents: int  # number of documents
    documents_byte_offset: int  # of the documents + 1 offsets in the file
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    eod_id: int
    checksum: str
    weights_byte_offset: int = 0  # of the first token's weight in the file; 0: all tokens count
    row_length: int = 0  # tokens of the rows that documents were packed in; 0: in none
    weights_checksum: str = ""
    listed: bool = False  # taken from SUMMARY, not yet from the file itself: see `confirmed`


def token_dtype(vocab_size: int) -> np.dtype:
    """The type of the token ids of a vocabulary: uint16 while all ids fit, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def _attributes(file: h5py.File) -> dict[str, Any]:
    values: dict[str, Any] = {}
    attributes = file.attrs  # h5py makes a new object each time it is asked
    weighted = "weights" in file
    for name in (*_INTEGERS, *_TEXTS, *(_WEIGHTED if weighted else ())):
        if name not in attributes:
            raise ValueError(f"has no attribute {name!r}")
        stored = attributes.get_id(name)
        kind, wanted, what = _KINDS[name in (*_TEXTS, "weights_checksum")]
        # looked at first: HDF5 2.0 crashes where it reads a text whose type is damaged
        if stored.shape != () or not isinstance(stored.get_type(), kind):
            raise ValueError(f"attribute {name!r} is no {what}")
        value = attributes[name]
        if not isinstance(value, wanted):
            raise ValueError(f"attribute {name!r} is {value!r}, no {what}")
        values[name] = value if wanted is str else int(value)
    if values["format_version"] != (WEIGHTED_VERSION if weighted else FORMAT_VERSION):
        raise ValueError(
            f"has format_version {values['format_version']}; this program reads {FORMAT_VERSION}, "
            f"and {WEIGHTED_VERSION} with weights"
        )
    if weighted and not 0 < values["row_length"] <= MOST:
        raise ValueError(f"has rows of {values['row_length']} tokens; at least 1 is needed")
    if not 0 <= values["eod_id"] < values["vocab_size"] <= 1 << 32:
        raise ValueError(
            f"has eod_id {values['eod_id']} and vocab_size {values['vocab_size']}; "
            "0 <= eod_id < vocab_size <= 2^32 is needed"
        )
    return values


def _extent(file: h5py.File, name: str, dtypes: tuple[str, ...]) -> tuple[int, np.dtype, int]:
    """Length, type and byte offset of a 1-D contiguous dataset that lies wholly inside the file."""
    data = file.get(name)
    if not isinstance(data, h5py.Dataset):
        raise TypeError(f"has no dataset {name!r}")
    dtype, shape = data.dtype, data.shape
    if dtype.str not in dtypes:
        raise ValueError(f"dataset {name!r} has type {dtype.str}; legal: {', '.join(dtypes)}")
    if shape is None or len(shape) != 1 or shape[0] < 1:
        raise ValueError(f"dataset {name!r} has shape {shape}; one dim, not empty, is needed")
    offset = data.id.get_offset()
    if data.chunks is not None or data.compression is not None or data.external or offset is None:
        raise ValueError(f"dataset {name!r} must be contiguous, uncompressed and inside the file")
    end, size = offset + shape[0] * dtype.itemsize, os.path.getsize(file.filename)
    if end > size:
        raise ValueError(f"is truncated: dataset {name!r} ends at byte {end}, the file at {size}")
    return shape[0], dtype, offset


def _check_heaps(path: Path, *datasets: tuple[int, int]) -> None:
    """Raises ValueError for a heap of texts whose objects do not fit into it: HDF5 2.0 reads such a
    one for ever. `datasets`: their bytes; heaps stand between or behind them.

    Source: HDF5 File Format Specification, III.E, "Disk Format: Level 1E - Global Heap".
    """
    begins, ends = zip(*sorted(datasets), strict=True)
    with open(path, "rb") as stream:
        for begin, stop in zip((0, *ends), (*begins, 1 << 62), strict=True):
            content = os.pread(stream.fileno(), max(0, min(stop - begin, _HEAP_BYTES)), begin)
            heap = content.find(b"GCOL")
            while heap >= 0:
                limit = heap + int.from_bytes(content[heap + 8 : heap + 16], "little")
                at = heap + 16
                while at + 16 <= min(limit, len(content)):
                    free = content[at : at + 2] == b"\0\0"
                    size = int.from_bytes(content[at + 8 : at + 16], "little")
                    step = size if free else 16 + -(-size // 8) * 8
                    if not 16 <= step <= limit - at:
                        raise ValueError("has damaged texts in its attributes")
                    at += step
                heap = content.find(b"GCOL", heap + 4)


def read_header(path: str | Path) -> ShardHeader:
    """Open a shard, validate its metadata, close it. Cost: independent of the number of tokens.

    Raises InputError that names the file, what is wrong and what would be right: no such file, not
    HDF5, truncated, missing datasets or attributes, a wrong type, layout or version, impossible
    offsets.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"shard {path}: {'is no file' if path.exists() else 'no such file'}")
    try:
        with h5py.File(path, "r") as file:
            tokens, dtype, byte_offset = _extent(file, "tokens", ("<u2", "<u4"))
            offsets, _, documents_byte_offset = _extent(file, "documents", ("<u8",))
            spans = [
                (byte_offset, byte_offset + tokens * dtype.itemsize),
                (documents_byte_offset, documents_byte_offset + 8 * offsets),
            ]
            weights_byte_offset = 0
            if "weights" in file:
                weights, _, weights_byte_offset = _extent(file, "weights", ("|u1",))
                if weights != tokens:
                    raise ValueError(f"has {weights} weights for {tokens} tokens")
                spans.append((weights_byte_offset, weights_byte_offset + weights))
            _check_heaps(path, *spans)
            values = _attributes(file)
        with open(path, "rb") as stream:
            ends = (documents_byte_offset, documents_byte_offset + 8 * (offsets - 1))
            first, last = (
                int.from_bytes(os.pread(stream.fileno(), 8, at), "little") for at in ends
            )
    # h5py reports a damaged file by whichever of these its C library's message maps to
    except (OSError, KeyError, TypeError, RuntimeError, ValueError, UnicodeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"shard {path}: {reason}; is it a shard of ptdmpi-data?") from error
    if offsets < 2 or first != 0 or last != tokens:
        raise InputError(
            f"shard {path}: {offsets} document offsets from {first} to {last}; "
            f"they must run from 0 to the number of tokens, {tokens}"
        )
    return ShardHeader(
        path=path,
        tokens=tokens,
        dtype=dtype,
        byte_offset=byte_offset,
        documents=offsets - 1,
        documents_byte_offset=documents_byte_offset,
        tokenizer=str(values["tokenizer"]),
        tokenizer_sha256=str(values["tokenizer_sha256"]),
        vocab_size=int(values["vocab_size"]),
        eod_id=int(values["eod_id"]),
        checksum=str(values["checksum"]),
        weights_byte_offset=weights_byte_offset,
        row_length=int(values.get("row_length", 0)),
        weights_checksum=str(values.get("weights_checksum", "")),
    )


def format_checksum(crc32: int) -> str:
    """The `checksum` attribute: CRC-32 (zlib's) over the bytes of `tokens`, as in
    "crc32:1c291ca3"."""
    return f"crc32:{crc32:08x}"


def headers_sha256(headers: Iterable[ShardHeader]) -> str:
    """What tells the tokens of one dataset from another's, without reading them: a SHA-256 over its
    shards in their order, each with its tokenizer, sizes and checksum; neither paths nor names."""
    names = ("tokenizer_sha256", "vocab_size", "eod_id", "tokens", "documents", "checksum")
    digest = hashlib.sha256()
    for header in headers:
        told = [getattr(header, name) for name in names]
        told += [header.row_length, header.weights_checksum] if header.row_length else []
        digest.update(json.dumps(told).encode())
    return digest.hexdigest()


_DTYPES = {"<u2": np.dtype("<u2"), "<u4": np.dtype("<u4")}
_OWN = tuple(one.name for one in fields(ShardHeader) if one.name not in ("path", "listed"))
_OPTIONAL = ("weights_byte_offset", "row_length", "weights_checksum")  # where there are weights
_FIELDS = frozenset(_OWN)


def listing(headers: Iterable[ShardHeader]) -> dict[str, dict[str, int | str]]:
    """What SUMMARY says of shards, by the names of their files."""
    return {
        header.path.name: {
            name: header.dtype.str if name == "dtype" else getattr(header, name)
            for name in _OWN
            if header.row_length or name not in _OPTIONAL
        }
        for header in headers
    }


def _listed(path: Path, entry: dict[str, Any]) -> ShardHeader:
    if entry.keys() not in (_FIELDS, _FIELDS - {*_OPTIONAL}):
        raise ValueError("other fields than a header has")
    numbers = (entry["byte_offset"], entry["documents_byte_offset"], entry["eod_id"])
    named = ("tokens", "documents", "vocab_size", "row_length", "weights_byte_offset")
    counts = tuple(entry[name] for name in named if name in entry)
    if set(map(type, numbers + counts)) != {int} or min(numbers) < 0 or min(counts) < 1:
        raise ValueError("a number is missing, or below what it can be")
    return ShardHeader(path=path, listed=True, **{**entry, "dtype": _DTYPES[entry["dtype"]]})


def listed_headers(directory: Path) -> dict[str, ShardHeader | None]:
    """The shards that SUMMARY lists, by the names of their files: with their headers, so that a
    start reads one file however many shards there are, and looks into a shard when it is first
    needed (`confirmed`). None for a shard listed by its name alone, as older versions did. Empty
    where there is no such file. Raises InputError if it is damaged.
    """
    path = directory / SUMMARY
    try:
        shards = json.loads(path.read_bytes())["shards"]
        if isinstance(shards, list):
            return dict.fromkeys(map(str, shards))
        return {name: _listed(directory / name, entry) for name, entry in shards.items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path}: is no list of shards by ptdmpi-data ({type(error).__name__}: {error}); "
            "remove it, and each shard is looked into instead"
        ) from error


def confirmed(header: ShardHeader) -> ShardHeader:
    """The header as the file itself has it. Raises InputError if the file differs from its list,
    as one does that was replaced, and what `read_header` raises."""
    if not header.listed:
        return header
    own = read_header(header.path)
    for name in _OWN:
        if getattr(own, name) != getattr(header, name):
            raise InputError(
                f"shard {header.path} has {name} {getattr(own, name)}, but {SUMMARY} beside it "
                f"says {getattr(header, name)}: one of the two was replaced; remove "
                f"{header.path.with_name(SUMMARY)} to take the shards as they are"
            )
    return own
