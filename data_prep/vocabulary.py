"""Tokenizers: bytes, Hugging Face `tokenizer.json` files (read and trained), others by name."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np

from data_prep.other_tokenizers import MISSING, SentencePieceTokenizer, TiktokenTokenizer
from ptdmpi.config import InputError
from ptdmpi.data.chat_template import TOKENIZER_CONFIG, json_object
from ptdmpi.data.header import token_dtype

# Where nothing else says. Gemma's vocabulary has "</s>", too, which is HTML there. The last one is
# BERT's: a model of its vocabulary has no room for a new id.
END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<eod>", "[SEP]")
# Beside a tokenizer.json, they name ends by their ids.
NAMING = ("config.json", "generation_config.json")
BYTES = "bytes"
TIKTOKEN = "tiktoken:"
GIGATOKEN = "gigatoken:"  # and the name of a tokenizer.json
_COMPARED_CHARACTERS = 4096
_RENEWED_CHARACTERS = 1 << 26  # after so many, gigatoken's memory of the words it met begins anew
BYTES_SHA256 = hashlib.sha256(BYTES.encode()).hexdigest()
MIN_VOCAB_SIZE = 257  # every byte and the end of document
MAX_VOCAB_SIZE = 1 << 24  # the library reserves memory for so many before it begins


class Vocabulary(Protocol):
    """What a shard says of the tokens in it."""

    name: str
    sha256: str
    vocab_size: int
    eod_id: int


class Tokenizer(Vocabulary, Protocol):
    """Text to token ids."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, in `token_dtype(vocab_size)`, without any added token."""

    def decode(self, ids: np.ndarray) -> str:
        """The text of some tokens, special ones included."""


class MarkedTokenizer(Tokenizer, Protocol):
    """One that also takes texts in which the names of special tokens mean these tokens, as what a
    chat template writes does."""

    special: frozenset[str]  # names of its special tokens

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids of each text, and where each begins in it: int64, in characters."""


class ByteTokenizer:
    """The bytes of the UTF-8 text: ids 0 to 255, and 256 for the end of a document."""

    name, sha256, vocab_size, eod_id = BYTES, BYTES_SHA256, 257, 256
    special = frozenset(END_OF_DOCUMENT[:1])

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The end of document is what it is decoded to."""
        return [self._marked(text) for text in texts]

    def _marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids, starts, at = list[int](), list[int](), 0
        for piece in text.split(END_OF_DOCUMENT[0]):
            if at:  # an end stands before it
                ids.append(self.eod_id)
                starts.append(at - len(END_OF_DOCUMENT[0]))
            for character in piece:
                encoded = character.encode()
                ids += encoded
                starts += [at] * len(encoded)
                at += 1
            at += len(END_OF_DOCUMENT[0])
        return np.array(ids, "<u2"), np.array(starts, np.int64)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype("<u2") for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        pieces = np.split(ids, np.flatnonzero(ids == self.eod_id))
        texts = [
            bytes(piece[piece < 256].astype(np.uint8)).decode(errors="replace") for piece in pieces
        ]
        return END_OF_DOCUMENT[0].join(texts)


class HuggingFaceTokenizer:
    """A `tokenizer.json` file. The end of document is what the files of its model beside it name as
    the end of a text, else the first of END_OF_DOCUMENT that its vocabulary has, else a new id
    behind it. Special tokens' names inside the text are ordinary text."""

    def __init__(self, path: str | Path):
        # The parallelism is that of our processes; rayon's threads on top would oversubscribe the
        # cores.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        path = Path(path)
        try:
            content = path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises plain Exception for a malformed file
            raise InputError(
                f"tokenizer {path}: {error}; legal: '{BYTES}', '{TIKTOKEN}NAME', a Hugging Face "
                "tokenizer.json or a SentencePiece .model"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise InputError(f"tokenizer {path}: its vocabulary is empty")
        known = max(vocabulary.values()) + 1
        listed = (vocabulary[text] for text in END_OF_DOCUMENT if text in vocabulary)
        named = _named_end(path.parent, vocabulary)
        self.eod_id = next(listed, known) if named is None else named
        self.vocab_size = max(known, self.eod_id + 1)
        self.name = path.name
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._dtype = token_dtype(self.vocab_size)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special = frozenset(token.content for token in added if token.special)

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        self._tokenizer.encode_special_tokens = False
        try:
            found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # plain Exception, for a character without a token, say
            raise InputError(f"tokenizer {self.name}: cannot encode a text: {error}") from error
        finally:
            self._tokenizer.encode_special_tokens = True
        return [
            (np.array(one.ids, self._dtype), np.array([a for a, _ in one.offsets], np.int64))
            for one in found
        ]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        try:
            # "fast": without the offsets, which nobody reads here
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # plain Exception, for a character without a token, say
            raise InputError(f"tokenizer {self.name}: cannot encode a text: {error}") from error
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def decode(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)


class GigatokenTokenizer(HuggingFaceTokenizer):
    """A `tokenizer.json` by the library gigatoken, which remembers the words that it met: the same
    tokens, many times as fast. Texts that name a special token, which it would take for one, go the
    slow way; the beginning of each batch goes both ways and is compared."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        try:
            import gigatoken
        except ImportError as error:
            raise InputError(f"tokenizer {GIGATOKEN}{path} needs gigatoken: {MISSING}") from error
        self._open = partial(gigatoken.Tokenizer.from_json, self._tokenizer.to_str())
        special = sorted(map(re.escape, self.special))
        self._special = re.compile(
            "|".join(special) or r"(?!)"
        )  # without any: what matches nowhere
        try:
            self._fast = self._open()
        except Exception as error:  # of no common class, for kinds of tokenizers that it lacks
            raise InputError(
                f"tokenizer {GIGATOKEN}{path}: {error}; without {GIGATOKEN} it may be read"
            ) from error
        self._characters = 0

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Raises InputError where the two ways differ."""
        slow = [number for number, text in enumerate(texts) if self._special.search(text)]
        ids = dict(zip(slow, super().encode([texts[number] for number in slow]), strict=True))
        fast = [number for number in range(len(texts)) if number not in ids]
        for number in fast[:1]:
            self._compare(texts[number][:_COMPARED_CHARACTERS])
        self._characters += sum(map(len, texts))
        if self._characters > _RENEWED_CHARACTERS:
            self._fast, self._characters = self._open(), 0
        ids |= {number: self._fast.encode(texts[number]).astype(self._dtype) for number in fast}
        return [ids[number] for number in range(len(texts))]

    def _compare(self, text: str) -> None:
        mine, theirs = self._fast.encode(text), super().encode([text])[0]
        if not np.array_equal(mine, theirs):
            raise InputError(
                f"tokenizer {GIGATOKEN}{self.name}: gives other tokens than without {GIGATOKEN}, "
                f"for the text that begins with {text[:40]!r}; use it without"
            )


def load_tokenizer(name: str | Path) -> Tokenizer:
    """`bytes`, `tiktoken:NAME`, `gigatoken:FILE`, or a file: SentencePiece's `.model`, else a
    `tokenizer.json`.

    Raises InputError for what is none of these, and where an extra library is missing.
    """
    if str(name) == BYTES:
        return ByteTokenizer()
    if str(name).startswith(TIKTOKEN):
        return TiktokenTokenizer(str(name).removeprefix(TIKTOKEN), END_OF_DOCUMENT)
    path = tokenizer_file(str(name))
    assert path is not None, "only names that are handled above have no file"
    read = (path, *(path.parent / one for one in (TOKENIZER_CONFIG, *NAMING)))
    at = tuple((one.stat().st_size, one.stat().st_mtime_ns) for one in read if one.is_file())
    return _load_file(path, str(name).startswith(GIGATOKEN), at)


@lru_cache(1)  # a large vocabulary takes half a second, and is asked for twice in a process
def _load_file(path: Path, fast: bool, state: tuple[tuple[int, int], ...]) -> Tokenizer:
    """`state`: sizes and times of all files, so that a changed one is read anew."""
    if fast:
        return GigatokenTokenizer(path)
    return SentencePieceTokenizer(path) if path.suffix == ".model" else HuggingFaceTokenizer(path)


def _named_end(folder: Path, vocabulary: Mapping[str, int]) -> int | None:
    """The id in a vocabulary that files beside its tokenizer name as the end of a text:
    `eos_token`, else the first `eos_token_id`. Raises InputError for a damaged one."""
    if (folder / TOKENIZER_CONFIG).is_file():
        token = json_object(folder / TOKENIZER_CONFIG).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text in vocabulary:
            return vocabulary[text]
    known = set(vocabulary.values())
    for path in (folder / name for name in NAMING if (folder / name).is_file()):
        ids = json_object(path).get("eos_token_id")
        for one in ids if isinstance(ids, list) else [ids]:
            if isinstance(one, int) and one in known:
                return one
    return None


def tokenizer_file(name: str) -> Path | None:
    """The file of a tokenizer, if it has one."""
    if name == BYTES or name.startswith(TIKTOKEN):
        return None
    return Path(name.removeprefix(GIGATOKEN))


def train_bpe(texts: Iterable[str], vocab_size: int) -> tuple[str, int]:
    """Train a byte-level BPE (Radford et al. 2019, section 2.2) with the special token
    <|endoftext|>.

    Returns the content of its tokenizer.json and its size, smaller than asked for where the texts
    do not have enough pairs. The same texts give the same tokenizer. Raises InputError for a size
    outside MIN_VOCAB_SIZE to MAX_VOCAB_SIZE.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        raise InputError(
            f"--vocab-size {vocab_size}: legal are {MIN_VOCAB_SIZE} (256 bytes and the end) to "
            f"{MAX_VOCAB_SIZE}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT[0]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True), tokenizer.get_vocab_size()
