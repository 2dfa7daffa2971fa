"""The tokenizer that belongs to a model: found where its shards or its conversion have left it."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np

from data_prep.vocabulary import BYTES, Tokenizer, load_tokenizer
from ptdmpi.config import InputError
from ptdmpi.data.header import ShardHeader, read_header
from ptdmpi.data.shards import find_shards
from ptdmpi.train.stored import KEPT, StoredModel

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Text:
    """Text to ids and back. `prefix`: what stands before every text (LLaMA's <s>); `ends`: the ids
    that end one; `eod`: what to begin with where there is nothing before."""

    tokenizer: Tokenizer
    prefix: tuple[int, ...]
    ends: frozenset[int]
    eod: int

    def encode(self, text: str) -> list[int]:
        """Without the prefix."""
        return self.tokenizer.encode([text])[0].tolist()

    def prompt(self, text: str) -> list[int]:
        """The ids of a text that begins here; never empty."""
        return [*self.prefix, *self.encode(text)] or [self.eod]

    def behind(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """The text of `ids` where they stand: some tokenizers leave out the first space of a
        text."""
        head, whole = self.decode(before), self.decode([*before, *ids])
        return whole[len(head) :] if whole.startswith(head) else self.decode(ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(np.array(ids, dtype=np.int64))


def find_text(stored: StoredModel, given: str | None = None) -> Text:
    """The tokenizer of the model; `given`: "bytes", or the path of a tokenizer.json.

    Raises InputError where none is known, or where it is not of this model.
    """
    kept = _kept(stored)
    header = _header(stored)
    if given is not None:
        name = given
    elif header is not None and header.tokenizer == BYTES:
        name = BYTES
    elif header is not None:
        name = str(_file_of(header, stored, kept))
    elif kept is not None and (kept / TOKENIZER).is_file():
        name = str(kept / TOKENIZER)
    else:
        raise InputError(
            f"{stored.path} does not say which tokenizer it has; give --tokenizer bytes or "
            "--tokenizer FILE, a tokenizer.json"
        )
    try:
        tokenizer = load_tokenizer(name)
    except ImportError as error:
        raise InputError(f"tokenizer {name}: {error}; pip install 'ptdmpi[data]'") from None
    special, ends = (), {tokenizer.eod_id}
    if kept is not None and header is None:
        ends, special = _ends(kept) or ends, _prefix(name)
    beyond = sorted(one for one in {*special, *ends} if one >= stored.vocab_size)
    if beyond and min(ends) >= stored.vocab_size:
        raise InputError(
            f"tokenizer {name} ends a text by id {beyond[0]}, the model has a vocabulary of "
            f"{stored.vocab_size}: give the --tokenizer that it was trained with"
        )
    return Text(tokenizer, special, frozenset(ends), min(ends))


def tokenizer_sha256(stored: StoredModel) -> str | None:
    """Of the tokenizer that the model knows, where that can be told."""
    try:
        header = _header(stored)
    except InputError:  # its shards have gone elsewhere
        return None
    if header is not None:
        return header.tokenizer_sha256
    kept = _kept(stored)
    if kept is None or not (kept / TOKENIZER).is_file():
        return None
    return hashlib.sha256((kept / TOKENIZER).read_bytes()).hexdigest()


def _kept(stored: StoredModel) -> Path | None:
    """What came from Hugging Face beside the weights, of this model or the one it began from."""
    began = stored.tree.get("checkpoint", {}).get("initial")
    folders = [stored.path / KEPT, *([Path(began) / KEPT] if began else [])]
    return next((folder for folder in folders if folder.is_dir()), None)


def _header(stored: StoredModel) -> ShardHeader | None:
    """Of the first shard that the model was trained on; None where it was not trained here.

    Raises InputError where it was, and the shards are gone.
    """
    datasets = stored.tree.get("data", {}).get("train", [])
    return read_header(find_shards(datasets[0]["path"])[0]) if datasets else None


def _file_of(header: ShardHeader, stored: StoredModel, kept: Path | None) -> Path:
    for path in _candidates(header, stored, kept):
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == (
            header.tokenizer_sha256
        ):
            return path
    raise InputError(
        f"the tokenizer of {header.path} ({header.tokenizer}, sha256 "
        f"{header.tokenizer_sha256[:12]}) does not lie beside the shards; give --tokenizer FILE"
    )


def _candidates(header: ShardHeader, stored: StoredModel, kept: Path | None) -> Iterator[Path]:
    shards = header.path.absolute()
    for folder in (stored.path, *([kept] if kept else []), *list(shards.parents)[:3]):
        yield folder / header.tokenizer


def _ends(kept: Path) -> set[int]:
    """The ids that config.json and generation_config.json name as ends."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (kept / name).is_file():
            value = json.loads((kept / name).read_bytes()).get("eos_token_id")
            values = value if isinstance(value, list) else [value]
            found |= {one for one in values if isinstance(one, int)}
    return found


def _prefix(name: str) -> tuple[int, ...]:
    """What the tokenizer itself puts before a text."""
    if name == BYTES:
        return ()
    from tokenizers import Tokenizer as HuggingFace

    found = HuggingFace.from_file(name).encode("a")
    special = takewhile(
        lambda pair: pair[1], zip(found.ids, found.special_tokens_mask, strict=True)
    )
    return tuple(token for token, _ in special)
