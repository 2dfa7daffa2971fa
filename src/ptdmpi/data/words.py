"""What masking must know of a tokenizer: where words begin, and the ids of its special tokens.

A word is a run of letters, digits, underscores and characters beyond ASCII, whatever its tokens;
vocabularies that mark what goes on (WordPiece, Devlin et al. 2019) or what ends a word are taken at
their word, and where nothing tells blanks, each token is a word. The rule is worked out anew at
each start from the `tokenizer.json` beside the shards; the byte tokenizer needs none.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptdmpi.config import InputError
from ptdmpi.data.shards import Dataset

BYTES = "bytes"
TOKENIZER = "tokenizer.json"
BLANK = "\u2581"
SPECIAL_NAMES = {
    "begin": ("[CLS]", "<cls>", "<s>"),
    "separator": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}


@dataclass(frozen=True)
class MaskingVocabulary:
    """`size` of the model's vocabulary, that of the shards and the special tokens that it lacks;
    `drawn` ids may stand in for a masked one. A token goes on with the word of the one before it
    if it is `inner` and that one `open` (bool [size] each)."""

    size: int
    drawn: int
    begin: int
    separator: int
    mask: int
    inner: np.ndarray
    open: np.ndarray

    def word_starts(self, tokens: np.ndarray) -> np.ndarray:
        """bool [n]: where a word begins."""
        starts = np.ones(len(tokens), dtype=bool)
        starts[1:] = ~(self.inner[tokens[1:]] & self.open[tokens[:-1]])
        return starts


def read_vocabulary(dataset: Dataset, whole_words: bool) -> MaskingVocabulary:
    """The vocabulary of the tokenizer that made the shards of `dataset`.

    Raises InputError if words are asked for and there is no `tokenizer.json` beside the shards, or
    it is of no known kind.
    """
    tree, ids = _tokenizer(dataset, whole_words)
    special, size = special_ids(ids, dataset.vocab_size)
    inner, opened = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
    if whole_words:
        apart = {token["id"] for token in tree.get("added_tokens", [])} | {dataset.eod_id}
        ends = _byte_ends if dataset.tokenizer == BYTES else _ends_of(tree, ids)
        for token, number in ids.items():
            if token and number not in apart and 0 <= number < size:
                inner[number], opened[number] = ends(token)
    return MaskingVocabulary(size, dataset.vocab_size, **special, inner=inner, open=opened)


def special_ids(ids: Mapping[str, int], size: int) -> tuple[dict[str, int], int]:
    """The id of each special token by its role, and the size of the vocabulary with those that the
    `size` tokens `ids` lack: they stand behind it."""
    special = {}
    for role, names in SPECIAL_NAMES.items():
        known = next((ids[name] for name in names if name in ids), size)
        special[role], size = known, size + (known == size)
    return special, size


def _tokenizer(dataset: Dataset, needed: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """The file's tree, and each token's id; both empty if there is none and none is needed."""
    if dataset.tokenizer == BYTES:
        return {}, {chr(byte): byte for byte in range(256)}
    path = Path(dataset.directory) / TOKENIZER
    if not path.is_file() and not needed:
        return {}, {}
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        ids = dict(tokens_of(tree))
        if not all(type(token) is str and type(number) is int for token, number in ids.items()):
            raise TypeError("a token's id is no number")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no tokenizer.json"
        raise InputError(
            f"{path}: {reason}; whole words are found by it: put it beside the shards, or set "
            "data.whole_words = false"
        ) from None
    return tree, ids


def tokens_of(tree: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Each token of a `tokenizer.json` and its id: vocabularies are tables, or, of Unigram models,
    lists with scores."""
    vocabulary = tree["model"]["vocab"]
    if isinstance(vocabulary, list):
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    yield from vocabulary.items()
    yield from ((token["content"], token["id"]) for token in tree.get("added_tokens", []))


Ends = Callable[[str], tuple[bool, bool]]  # token -> does a word go on in it, and behind it


def _ends_of(tree: dict[str, Any], ids: dict[str, int]) -> Ends:
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
    """How byte-level BPE writes each byte: printable ones as themselves, the others from 256 on
    (Radford et al. 2019, section 2.2)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _byte_ends(token: str) -> tuple[bool, bool]:
    """The ends of a token whose characters are bytes; those beyond ASCII are parts of letters."""
    first, last = (c.isalnum() or c == "_" or ord(c) > 127 for c in (token[0], token[-1]))
    return first, last


def _text_ends(token: str) -> tuple[bool, bool]:
    """The ends of a token that is written as it is, a blank as BLANK, a byte as <0x..>."""
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
        return _byte_ends(chr(int(token[3:-1], 16)))
    first, last = (c.isalnum() or c == "_" for c in (token[0], token[-1]))
    return first, last
