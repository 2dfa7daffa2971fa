"""The properties of a vocabulary that masking needs: which tokens begin words, and the ids of
special tokens.

A word is a run of letters, digits, underscores and characters beyond ASCII, however it is divided
into tokens. If a vocabulary marks the tokens that continue a word (WordPiece, Devlin et al. 2019)
or the tokens that end a word, these marks decide where words begin. If no token of the vocabulary
contains a blank, each token is a word. When a run starts, it reads the `tokenizer.json` in the
folder of the shards to find out where words begin. Only the byte tokenizer needs no file.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ptdmpi.base.disk import read_file
from ptdmpi.config import InputError
from ptdmpi.data.header import ShardHeader
from ptdmpi.data.shards import Dataset

BYTES = "bytes"
TOKENIZER = "tokenizer.json"
# A tokenizer whose name begins or ends with one of these texts has no tokenizer.json. Shards that
# such a tokenizer made do not record the hash of a tokenizer.json.
NO_JSON_STARTS = ("tiktoken:", "unknown-")
NO_JSON_END = ".model"
BLANK = "\u2581"  # the character that SentencePiece writes for a blank.
# The names that tokenizers give to special tokens, by their role in masking.
SPECIAL_NAMES = {
    "begin": ("[CLS]", "<cls>", "<s>"),
    "separator": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}


@dataclass(frozen=True)
class MaskingVocabulary:
    """The properties of a vocabulary that masking needs: the ids of special tokens, and two arrays
    that show which tokens begin words.

    `size` is the size of the model's vocabulary: the number of ids in the shards, plus the number
    of special tokens that the shards lack. `drawn` is the limit for random tokens: if masking
    replaces a token by a random token, the random id is below `drawn`. `begin`, `separator` and
    `mask` are ids. `inner` and `open` are bool [size]: token B continues the word of the token A
    before it if `inner[B]` and `open[A]` are True.
    """

    size: int
    drawn: int
    begin: int
    separator: int
    mask: int
    inner: np.ndarray
    open: np.ndarray

    def word_starts(self, tokens: np.ndarray) -> np.ndarray:
        """Return True for each of the tokens (int [n]) that begins a word, bool [n]."""
        starts = np.ones(len(tokens), dtype=bool)
        starts[1:] = ~(self.inner[tokens[1:]] & self.open[tokens[:-1]])
        return starts


def read_vocabulary(dataset: Dataset, whole_words: bool) -> MaskingVocabulary:
    """Return the vocabulary of the tokenizer that made the shards of `dataset`.

    Raise InputError if the folder of the shards has a `tokenizer.json` that cannot be used, or that
    is not the one from which the shards were made. Also raise InputError if `whole_words` is True
    and there is no `tokenizer.json`.
    """
    tree, ids = _tokenizer(dataset, whole_words)
    special = special_ids(ids, dataset.vocab_size)
    inner = np.zeros(special.size, dtype=bool)
    opened = np.zeros(special.size, dtype=bool)
    if whole_words:
        apart = {token["id"] for token in tree.get("added_tokens", [])} | {dataset.eod_id}
        ends = _byte_ends if dataset.tokenizer == BYTES else _ends_of(tree, ids)
        for token, number in ids.items():
            if token and number not in apart and 0 <= number < special.size:
                inner[number], opened[number] = ends(token)
    return MaskingVocabulary(
        special.size, dataset.vocab_size, **special.ids, inner=inner, open=opened
    )


class SpecialTokens(NamedTuple):
    """The id of each special token by its role, and the size of the vocabulary including these
    tokens."""

    ids: dict[str, int]
    size: int


def special_ids(ids: Mapping[str, int], size: int) -> SpecialTokens:
    """Return the special tokens of a vocabulary of `size` tokens; `ids` maps each token to its id.
    Special tokens that the vocabulary lacks get new ids, from `size` on."""
    special = {}
    for role, names in SPECIAL_NAMES.items():
        special[role] = next((ids[name] for name in names if name in ids), size)
        if special[role] == size:
            size += 1
    return SpecialTokens(special, size)


def _tokenizer(dataset: Dataset, needed: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the content of the dataset's `tokenizer.json`, and the id of each token. For the byte
    tokenizer, which has no such file, return an empty content and the ids of all bytes. If the file
    is missing and not `needed`, return an empty content and no ids. Raise InputError if the file
    cannot be used, if it has another hash than the shards record, or if it is `needed` and
    missing."""
    if dataset.tokenizer == BYTES:
        return {}, {chr(byte): byte for byte in range(256)}
    path = Path(dataset.directory) / TOKENIZER
    if not path.is_file() and not needed:
        return {}, {}
    try:
        content = read_file(path)
        if mistake := _json_mistake(path, content, dataset):
            raise InputError(mistake)
        tree = json.loads(content)
        ids = dict(tokens_of(tree))
        if not all(type(token) is str and type(number) is int for token, number in ids.items()):
            raise TypeError("a token's id is not a number")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not a tokenizer.json"
        raise InputError(
            f"{path}: {reason}; masking of whole words needs this file: put it into the folder "
            "of the shards, or set data.whole_words = false"
        ) from None
    return tree, ids


def _json_mistake(path: Path, content: bytes, dataset: Dataset) -> str:
    name = dataset.tokenizer
    if name.startswith(NO_JSON_STARTS) or name.endswith(NO_JSON_END):
        return ""
    return tokenizer_mistake(path, content, dataset)


def tokenizer_mistake(path: Path, content: bytes, shards: Dataset | ShardHeader) -> str:
    """Return the reason why the file `path` with this content is not the tokenizer that made the
    shards; "" if the file is this tokenizer. The shards record the SHA-256 of the tokenizer's
    file."""
    actual = hashlib.sha256(content).hexdigest()
    if actual == shards.tokenizer_sha256:
        return ""
    return (
        f"{path}: has sha256 {actual}, but the shards record {shards.tokenizer_sha256}; replace it "
        f"by the file {shards.tokenizer} from which the shards were made"
    )


def tokens_of(tree: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield each token of a `tokenizer.json` with its id. Raise KeyError if the file has no
    vocabulary.

    The vocabulary is a table from token to id, or, for Unigram models, a list of (token, score).
    """
    vocabulary = tree["model"]["vocab"]
    if isinstance(vocabulary, list):
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    yield from vocabulary.items()
    yield from ((token["content"], token["id"]) for token in tree.get("added_tokens", []))


# A function that returns two values for a token: whether this token can continue the word of the
# previous token, and whether the next token can continue the word of this token.
Ends = Callable[[str], tuple[bool, bool]]


def _ends_of(tree: dict[str, Any], ids: dict[str, int]) -> Ends:
    """Return a function of the type `Ends` for a tokenizer. Tokenizers mark the beginnings or ends
    of words in different ways. The returned function recognizes the marks of this tokenizer."""
    model = tree["model"]
    if prefix := model.get("continuing_subword_prefix"):
        return lambda token: (token.startswith(prefix), True)
    if suffix := model.get("end_of_word_suffix"):
        return lambda token: (True, not token.endswith(suffix))
    parts = json.dumps([tree.get("pre_tokenizer"), tree.get("decoder")])
    if '"ByteLevel"' in parts:
        byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
        return lambda token: _byte_ends("".join(chr(byte_of.get(c, 32)) for c in token))
    marked = any(token.startswith(BLANK) for token in ids)
    return _text_ends if marked else lambda token: (False, False)


def _byte_characters() -> list[str]:
    """Return the character that byte-level BPE writes for each byte: printable bytes as themselves,
    all other bytes as the characters from 256 on (Radford et al. 2019, section 2.2)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _byte_ends(token: str) -> tuple[bool, bool]:
    """Return two values: whether the first byte, and whether the last byte, of a token is part of a
    word. Each character of `token` represents one byte. Bytes beyond ASCII are treated as parts of
    words, because they are parts of letters."""
    return _byte_in_word(token[0]), _byte_in_word(token[-1])


def _byte_in_word(character: str) -> bool:
    return _in_word(character) or ord(character) > 127


def _text_ends(token: str) -> tuple[bool, bool]:
    """Return two values: whether the first character, and whether the last character, of a token is
    part of a word. The token is plain text, in which BLANK represents a blank and <0x..> a byte."""
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
        return _byte_ends(chr(int(token[3:-1], 16)))
    return _in_word(token[0]), _in_word(token[-1])


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "_"
