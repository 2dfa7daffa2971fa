"""Descriptions and checks of a dataset, for `ptdmpi-data inspect` and `verify`."""

from pathlib import Path
from typing import Any

import numpy as np

from data_prep.state import TOKENIZER_COPY
from data_prep.vocabulary import BYTES, BYTES_SHA256, Tokenizer, load_tokenizer
from ptdmpi.base.disk import read_file
from ptdmpi.base.words import counted
from ptdmpi.config import InputError
from ptdmpi.data.header import ShardHeader, confirmed, read_header
from ptdmpi.data.shards import Dataset, find_shards, map_tokens, map_weights, verify
from ptdmpi.data.words import tokenizer_mistake

_SHOWN_TOKENS = 16


def shard_paths(path: Path) -> list[Path]:
    """Return the paths of the shards in the directory `path`, or `path` itself if it is a shard.
    Raise InputError if there is no shard."""
    if not path.exists():
        raise InputError(f"{path}: no such file or directory")
    return find_shards(path) if path.is_dir() else [path]


def _tokenizer_of(header: ShardHeader) -> Tokenizer | None:
    """Return the tokenizer of a shard, or None if the tokenizer's file is not in the directory of
    the shard."""
    if header.tokenizer_sha256 == BYTES_SHA256:
        return load_tokenizer(BYTES)
    for copy in header.path.parent.glob(f"{TOKENIZER_COPY}.*"):
        if copy.is_file() and not tokenizer_mistake(copy, copy.read_bytes(), header):
            return load_tokenizer(copy)
    return None


def describe(path: Path) -> dict[str, Any]:
    """Return a description of the dataset or shard `path`: sums over all shards, a description of
    each shard, and the first tokens with their text.

    The text is None if the tokenizer's file is not found. Raise InputError for a damaged shard.
    """
    headers = [read_header(shard) for shard in shard_paths(path)]
    first = headers[0]
    ids: np.ndarray = map_tokens(first)[:_SHOWN_TOKENS]
    tokenizer = _tokenizer_of(first)
    rows = {}
    if first.row_length:
        rows["row_length"] = first.row_length
    if first.pairs:
        rows["holds"] = "pairs of answers"
    return {
        "path": str(path),
        "tokens": sum(header.tokens for header in headers),
        "documents": sum(header.documents for header in headers),
        "tokenizer": first.tokenizer,
        "tokenizer_sha256": first.tokenizer_sha256,
        "vocab_size": first.vocab_size,
        "eod_id": first.eod_id,
        **rows,
        "first_tokens": ids.tolist(),
        "first_text": None if tokenizer is None else tokenizer.decode(ids),
        "shards": [_record(header) for header in headers],
    }


def _record(header: ShardHeader) -> dict[str, Any]:
    """Return the description of one shard."""
    answers = {}
    if header.row_length:
        answers["answer_tokens"] = int(map_weights(header).sum())
    return {
        "path": str(header.path),
        "tokens": header.tokens,
        "documents": header.documents,
        "dtype": header.dtype.name,
        **answers,
        "checksum": header.checksum,
    }


def format_description(description: dict[str, Any]) -> str:
    """Return a description of a dataset as text for a terminal."""
    shards = description["shards"]
    lines = [
        f"{description['path']}: {description['tokens']:,} tokens, "
        f"{description['documents']:,} documents",
        f"tokenizer {description['tokenizer']} (sha256 {description['tokenizer_sha256']})",
        f"vocab_size {description['vocab_size']}, eod_id {description['eod_id']}",
    ]
    if "row_length" in description:
        answers = sum(shard["answer_tokens"] for shard in shards)
        lines.append(
            f"rows of {description['row_length']:,} tokens; {answers:,} tokens count as labels"
        )
    if "holds" in description:
        lines.append(f"holds {description['holds']}")
    lines.append(f"{'shard':<28} {'tokens':>16} {'documents':>14}  {'type':<7} checksum")
    for shard in shards:
        lines.append(
            f"{Path(shard['path']).name:<28} {shard['tokens']:>16,} {shard['documents']:>14,}  "
            f"{shard['dtype']:<7} {shard['checksum']}"
        )
    lines.append(f"first tokens: {' '.join(map(str, description['first_tokens']))}")
    if description["first_text"] is not None:
        lines.append(f"as text: {description['first_text']!r}")
    return "\n".join(lines)


def _tokenizer_problems(header: ShardHeader) -> list[str]:
    """Return a list with one text that describes the mistake in the copy of the tokenizer next to a
    shard. The list is empty if the copy is correct or missing, or if the shard's tokenizer has no
    file."""
    suffix = Path(header.tokenizer).suffix
    copy = header.path.with_name(TOKENIZER_COPY + suffix)
    if suffix not in (".json", ".model"):
        return []
    try:
        mistake = tokenizer_mistake(copy, read_file(copy), header)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{copy}: cannot be read: {error.strerror}"]
    return [mistake] if mistake else []


def examined(path: Path) -> dict[str, Any]:
    """Return the mistakes in a dataset or shard, its number of shards, and, if there are no
    mistakes, notes on what cannot be checked.

    Raise InputError if there is no shard at all.
    """
    paths = shard_paths(path)
    mistakes = _problems(path, paths)
    notes = [] if mistakes else _notes(path, paths)
    return {"path": str(path), "shards": len(paths), "problems": mistakes, "notes": notes}


def format_examined(result: dict[str, Any]) -> str:
    """Return the result of `examined` as text for a terminal."""
    sound = f"{result['path']}: {counted(result['shards'], 'shard')}, all sound"
    return "\n".join(result["problems"] or [sound, *result["notes"]])


def _notes(path: Path, paths: list[Path]) -> list[str]:
    unknown = sum(not read_header(shard).documents_checksum for shard in paths)
    if not unknown:
        return []
    return [
        f"note: {path}: the document offsets of {counted(unknown, 'shard')} have no checksum, "
        "because an older version of ptdmpi wrote them; only their order was checked"
    ]


def _problems(path: Path, paths: list[Path]) -> list[str]:
    """Return the mistakes in a dataset, or in one shard, one line for each mistake. In a dataset,
    the copy of the tokenizer is checked, too."""
    mistakes = [mistake for shard in paths for mistake in verify(shard)]
    if not mistakes and path.is_dir():
        try:
            headers = [confirmed(header) for header in Dataset(path).headers]
            mistakes += _tokenizer_problems(headers[0])
        except InputError as error:  # each shard is valid, but they do not belong to one dataset
            mistakes.append(str(error))
    return mistakes
