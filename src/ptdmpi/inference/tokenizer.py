"""Which tokenizer a stored model has: where its shards, or its conversion, have left the file."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from ptdmpi.config import InputError
from ptdmpi.data.chat_template import TEMPLATE
from ptdmpi.data.header import ShardHeader, read_header
from ptdmpi.data.shards import find_shards
from ptdmpi.inference.stored import KEPT, StoredAdapter, StoredModel, open_model

TOKENIZER = "tokenizer.json"


def kept_files(stored: StoredModel) -> Path | None:
    """What came from Hugging Face beside the weights, of this model or the one it began from."""
    paths = (stored.path, stored.began)
    folders = (path / KEPT for path in paths if path is not None)
    return next((folder for folder in folders if folder.is_dir()), None)


def shard_header(stored: StoredModel | StoredAdapter) -> ShardHeader | None:
    """The header of the first shard that the model, or the adapters, were trained on; None where
    that was not here.

    Raises InputError where it was, and the shards are gone, or were made anew with another
    tokenizer.
    """
    if not stored.datasets:
        return None
    header, known = read_header(find_shards(stored.datasets[0])[0]), stored.trained_on
    if known is not None and known.tokenizer_sha256 != header.tokenizer_sha256:
        raise InputError(
            f"{header.path} was made anew with tokenizer {header.tokenizer} (sha256 "
            f"{header.tokenizer_sha256[:12]}); the model was trained with {known.tokenizer} "
            f"(sha256 {known.tokenizer_sha256[:12]})"
        )
    return header


def template_file(stored: StoredModel | StoredAdapter) -> Path | None:
    """The chat template of the conversations that the model, or the adapters, were trained on: it
    lies beside a merged model's config.toml, else beside the shards. None where these are plain
    text, or the training was not here. Raises InputError as `shard_header` does."""
    if isinstance(stored, StoredModel) and (stored.path / TEMPLATE).is_file():
        return stored.path / TEMPLATE
    header = shard_header(stored)
    found = None if header is None else header.path.parent / TEMPLATE
    return found if found is not None and found.is_file() else None


def find_tokenizer(header: ShardHeader, stored: StoredModel) -> Path:
    """The file of the tokenizer that made a shard of the model. Raises InputError."""
    for path in _candidates(header, stored):
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == (
            header.tokenizer_sha256
        ):
            return path
    raise InputError(
        f"the tokenizer of {header.path} ({header.tokenizer}, sha256 "
        f"{header.tokenizer_sha256[:12]}) does not lie beside the shards"
    )


def _candidates(header: ShardHeader, stored: StoredModel) -> Iterator[Path]:
    shards, kept = header.path.absolute(), kept_files(stored)
    copy = Path(TOKENIZER).with_suffix(Path(header.tokenizer).suffix)  # as ptdmpi-data names it
    for folder in (stored.path, *([kept] if kept else []), *list(shards.parents)[:3]):
        yield from (folder / header.tokenizer, folder / copy)


def known_tokenizer(path: Path) -> str | None:
    """SHA-256 of the tokenizer that the model at `path` knows, where that can be told."""
    try:
        return tokenizer_sha256(open_model(path))
    except InputError:  # without a config.toml, say
        return None


def tokenizer_sha256(stored: StoredModel) -> str | None:
    """The hash of the tokenizer that the model knows, where that can be told."""
    trained_on = stored.trained_on
    if trained_on is not None:
        return trained_on.tokenizer_sha256
    try:
        header = shard_header(stored)
    except InputError:  # its shards have gone elsewhere
        return None
    if header is not None:
        return header.tokenizer_sha256
    kept = kept_files(stored)
    if kept is None or not (kept / TOKENIZER).is_file():
        return None
    return hashlib.sha256((kept / TOKENIZER).read_bytes()).hexdigest()
