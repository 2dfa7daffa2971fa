"""The tokenizer of a stored model. The headers of the token shards on which the model was trained
name the tokenizer. A converted model has its own tokenizer file."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from ptdmpi.config import InputError
from ptdmpi.data.chat_template import TEMPLATE
from ptdmpi.data.header import ShardHeader, read_header
from ptdmpi.data.own import is_own
from ptdmpi.data.shards import find_shards
from ptdmpi.data.words import TOKENIZER, tokenizer_mistake
from ptdmpi.inference.stored import KEPT, StoredAdapter, StoredModel, open_model


def kept_files(stored: StoredModel) -> Path | None:
    """Return the folder of files that came with the weights from Hugging Face; None if there is
    none.

    The folder belongs to this model, or to the model from which its training began.
    """
    paths = (stored.path, stored.began)
    folders = (path / KEPT for path in paths if path is not None)
    return next((folder for folder in folders if folder.is_dir()), None)


def own_dataset(stored: StoredModel | StoredAdapter) -> str | None:
    """Return the name of the dataset that the model or the adapters were trained on, if it is a
    class of the user's own; otherwise None. Such a dataset has no shards."""
    known = stored.trained_on
    for path in stored.datasets[:1]:
        # An installed package may register a name for a dataset class. If this package is not
        # installed now, `is_own` does not know the name. Then compare the name with the recorded
        # tokenizer, because a dataset without a tokenizer records its own name there.
        if is_own(path) or (known is not None and known.tokenizer == path):
            return path
    return None


def shard_header(stored: StoredModel | StoredAdapter) -> ShardHeader | None:
    """Return the header of the first shard that the model or the adapters were trained on.

    Return None if ptdmpi did not train the model or the adapters on shards. Raise InputError if
    the shards are missing, or if they were made again with another tokenizer after the training.
    """
    if not stored.datasets or own_dataset(stored) is not None:
        return None
    header = read_header(find_shards(stored.datasets[0])[0])
    known = stored.trained_on
    if known is not None and known.tokenizer_sha256 != header.tokenizer_sha256:
        raise InputError(
            f"{header.path} was made again with tokenizer {header.tokenizer} (sha256 "
            f"{header.tokenizer_sha256[:12]}); the model was trained with {known.tokenizer} "
            f"(sha256 {known.tokenizer_sha256[:12]})"
        )
    return header


def template_file(stored: StoredModel | StoredAdapter) -> Path | None:
    """Return the file of the chat template for the conversations on which the model or the adapters
    were trained.

    The file is in the folder of a merged model or of imported adapters, or else in the folder of
    the shards. Return None if the shards are plain text, or if ptdmpi did not train the model.
    Raise the same errors as `shard_header`.
    """
    if (stored.path / TEMPLATE).is_file():
        return stored.path / TEMPLATE
    header = shard_header(stored)
    if header is None:
        return None
    template = header.path.parent / TEMPLATE
    return template if template.is_file() else None


def find_tokenizer(header: ShardHeader, stored: StoredModel) -> Path:
    """Return the file of the tokenizer that encoded a shard of the model's training data. `header`
    is the header of this shard.

    Raise InputError if no file with the SHA-256 of this tokenizer is found.
    """
    reason = (
        f"the tokenizer of {header.path} ({header.tokenizer}, sha256 "
        f"{header.tokenizer_sha256[:12]}) is not in the folder of the shards"
    )
    for path in _candidates(header, stored):
        if path.is_file():
            mistake = tokenizer_mistake(path, path.read_bytes(), header)
            if not mistake:
                return path
            if path.parent == header.path.absolute().parent:
                reason = mistake
    raise InputError(reason)


def _candidates(header: ShardHeader, stored: StoredModel) -> Iterator[Path]:
    """Yield the paths at which the tokenizer of a shard of training data may be, the most likely
    first."""
    folders = [stored.path]
    kept = kept_files(stored)
    if kept is not None:
        folders.append(kept)
    folders += list(header.path.absolute().parents)[:3]
    # the name that ptdmpi-data gives to its copy of the tokenizer
    copy = Path(TOKENIZER).with_suffix(Path(header.tokenizer).suffix)
    for folder in folders:
        yield from (folder / header.tokenizer, folder / copy)


def known_tokenizer(path: Path) -> str | None:
    """Return the SHA-256 of the tokenizer of the model at `path`, or the hash of the user's own
    dataset that it was trained on; None if both are unknown."""
    try:
        stored = open_model(path)
        if own_dataset(stored) is not None and stored.trained_on is not None:
            return stored.trained_on.tokenizer_sha256
        return tokenizer_sha256(stored)
    except InputError:  # the model cannot be opened, for example because there is no config.toml
        return None


def tokenizer_sha256(stored: StoredModel) -> str | None:
    """Return the SHA-256 of the model's tokenizer; None if the tokenizer is not known. If the model
    was trained on a dataset of the user's own, the result is also None, because the hash of such a
    dataset is not the hash of a tokenizer file."""
    if own_dataset(stored) is not None:
        return None
    trained_on = stored.trained_on
    if trained_on is not None:
        return trained_on.tokenizer_sha256
    try:
        header = shard_header(stored)
    except InputError:  # the shards are no longer at the recorded path
        return None
    if header is not None:
        return header.tokenizer_sha256
    kept = kept_files(stored)
    if kept is None or not (kept / TOKENIZER).is_file():
        return None
    return hashlib.sha256((kept / TOKENIZER).read_bytes()).hexdigest()
