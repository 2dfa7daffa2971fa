"""What is in a dataset, and whether it is sound: `ptdmpi-data inspect` and `verify`."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.state import TOKENIZER_COPY
from data_prep.vocabulary import BYTES, BYTES_SHA256, Tokenizer, load_tokenizer
from ptdmpi.config import InputError
from ptdmpi.data.header import ShardHeader, confirmed, read_header
from ptdmpi.data.shards import Dataset, find_shards, map_tokens, map_weights, verify

_SHOWN_TOKENS = 16


def shard_paths(path: Path) -> list[Path]:
    """The shards meant by a directory or a file. Raises InputError if there are none."""
    return find_shards(path) if path.is_dir() else [path]


def _tokenizer_of(header: ShardHeader) -> Tokenizer | None:
    """The tokenizer that made a shard, if it is at hand."""
    if header.tokenizer_sha256 == BYTES_SHA256:
        return load_tokenizer(BYTES)
    for copy in header.path.parent.glob(f"{TOKENIZER_COPY}.*"):
        if (
            copy.is_file()
            and hashlib.sha256(copy.read_bytes()).hexdigest() == header.tokenizer_sha256
        ):
            return load_tokenizer(copy)
    return None


def describe(path: Path) -> dict[str, Any]:
    """Sums over all shards, one record per shard, and the first tokens with their text (None where
    the tokenizer is not at hand). Raises InputError for a shard that is damaged."""
    headers = [read_header(shard) for shard in shard_paths(path)]
    first = headers[0]
    ids: np.ndarray = map_tokens(first)[:_SHOWN_TOKENS]
    tokenizer = _tokenizer_of(first)
    shards = [
        {
            "path": str(header.path),
            "tokens": header.tokens,
            "documents": header.documents,
            "dtype": header.dtype.name,
            **({"answer_tokens": int(map_weights(header).sum())} if header.row_length else {}),
            "checksum": header.checksum,
        }
        for header in headers
    ]
    return {
        "path": str(path),
        "tokens": sum(header.tokens for header in headers),
        "documents": sum(header.documents for header in headers),
        "tokenizer": first.tokenizer,
        "tokenizer_sha256": first.tokenizer_sha256,
        "vocab_size": first.vocab_size,
        "eod_id": first.eod_id,
        **({"row_length": first.row_length} if first.row_length else {}),
        "first_tokens": ids.tolist(),
        "first_text": None if tokenizer is None else tokenizer.decode(ids),
        "shards": shards,
    }


def format_description(description: dict[str, Any]) -> str:
    """The same as text for a terminal."""
    of = description
    lines = [
        f"{of['path']}: {of['tokens']:,} tokens, {of['documents']:,} documents",
        f"tokenizer {of['tokenizer']} (sha256 {of['tokenizer_sha256']})",
        f"vocab_size {of['vocab_size']}, eod_id {of['eod_id']}",
        f"{'shard':<28} {'tokens':>16} {'documents':>14}  {'type':<7} checksum",
    ]
    if "row_length" in of:
        answers = sum(shard["answer_tokens"] for shard in of["shards"])
        lines.insert(3, f"rows of {of['row_length']:,} tokens; {answers:,} tokens count as labels")
    for shard in of["shards"]:
        lines.append(
            f"{Path(shard['path']).name:<28} {shard['tokens']:>16,} {shard['documents']:>14,}  "
            f"{shard['dtype']:<7} {shard['checksum']}"
        )
    lines.append(f"first tokens: {' '.join(map(str, of['first_tokens']))}")
    if of["first_text"] is not None:
        lines.append(f"as text: {of['first_text']!r}")
    return "\n".join(lines)


def problems(path: Path) -> list[str]:
    """All that is wrong with the shards of a directory, or with one shard; one line each.

    Raises InputError if there is no shard at all.
    """
    paths = shard_paths(path)
    found = [problem for shard in paths for problem in verify(shard)]
    if not found and path.is_dir():
        try:
            for header in Dataset(path).headers:
                confirmed(header)
        except InputError as error:  # each shard is sound, but they do not go together
            found.append(str(error))
    return found
