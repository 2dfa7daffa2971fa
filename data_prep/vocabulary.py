"""Tokenizers: bytes, Hugging Face's `tokenizer.json` files, and files of other libraries. This
module can also train a `tokenizer.json` file."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np

from data_prep.other_tokenizers import MISSING, SentencePieceTokenizer, TiktokenTokenizer
from ptdmpi.base.disk import read_file
from ptdmpi.base.hub import downloaded, is_hub_name
from ptdmpi.base.say import note
from ptdmpi.base.words import counted
from ptdmpi.config import InputError
from ptdmpi.data.chat_template import TOKENIZER_CONFIG, json_object
from ptdmpi.data.header import token_dtype

# The names of end-of-document tokens, in order of preference. This list is used if a model's files
# do not name its end-of-document token. <eos> comes before </s>, because Gemma's vocabulary also
# contains </s>, as an HTML tag. The last name is for BERT, whose models have no room for a new id.
END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<eod>", "[SEP]")
# files next to a tokenizer.json that may contain the id that ends a text
NAMING = ("config.json", "generation_config.json")
# the files of a model on the hub that are needed for its tokenizer and its chat template
HUB_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", *NAMING)
BYTES = "bytes"
TIKTOKEN = "tiktoken:"
GIGATOKEN = "gigatoken:"  # this prefix is followed by the path of a tokenizer.json
_COMPARED_CHARACTERS = 4096
# the word cache of gigatoken is emptied after this number of encoded characters
_RENEWED_CHARACTERS = 1 << 26
BYTES_SHA256 = hashlib.sha256(BYTES.encode()).hexdigest()
MIN_VOCAB_SIZE = 257  # the smallest vocabulary: 256 bytes and the end-of-document token
# The library `tokenizers` reserves memory for the requested number of tokens before it trains, so
# larger numbers are refused.
MAX_VOCAB_SIZE = 1 << 24
# The time to train on a word grows with the square of its length: a word of 3 MB would take hours.
# A word is a run of letters, of digits, of other characters or of spaces, as in GPT-2's tokenizer.
MOST_LETTERS = 1000
_KINDS = (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s")
LONG_WORD = re.compile("|".join(f"{kind}{{{MOST_LETTERS}}}" for kind in _KINDS))


class Vocabulary(Protocol):
    """The properties of a vocabulary that are stored in the header of a shard."""

    name: str
    sha256: str
    vocab_size: int
    eod_id: int


class Tokenizer(Vocabulary, Protocol):
    """A vocabulary that encodes texts as token ids."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, as arrays of the type `token_dtype(vocab_size)`. No
        token is added. Raise InputError for a text that cannot be encoded."""

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of token ids, including special tokens."""


class MarkedTokenizer(Tokenizer, Protocol):
    """A tokenizer that can also encode the name of a special token in a text, such as
    <|endoftext|>, as this token. Chat templates need such a tokenizer, because they write the names
    of special tokens into texts."""

    special: frozenset[str]  # names of the tokenizer's special tokens

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the token ids of each text, and the index of the first character of each token
        (int64). The names of special tokens are encoded as special tokens."""


class ByteTokenizer:
    """A tokenizer whose tokens are the bytes of the UTF-8 text: the ids 0 to 255 are the bytes, and
    id 256 is the end-of-document token."""

    name = BYTES
    sha256 = BYTES_SHA256
    vocab_size = 257
    eod_id = 256
    special = frozenset(END_OF_DOCUMENT[:1])

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the token ids of each text, and the index of the first character of each token.
        The text <|endoftext|> is encoded as the end-of-document id."""
        return [self._marked(text) for text in texts]

    def _marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids: list[int] = []
        starts: list[int] = []
        at = 0
        for piece in text.split(END_OF_DOCUMENT[0]):
            if at:  # the end-of-document token comes before this piece
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
        """Return the token ids of each text, which are its bytes, as uint16."""
        return [np.frombuffer(text.encode(), np.uint8).astype("<u2") for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of token ids, with <|endoftext|> for an end of document."""
        pieces = np.split(ids, np.flatnonzero(ids == self.eod_id))
        texts = [
            bytes(piece[piece < 256].astype(np.uint8)).decode(errors="replace") for piece in pieces
        ]
        return END_OF_DOCUMENT[0].join(texts)


class HuggingFaceTokenizer:
    """A tokenizer from a `tokenizer.json` file.

    The end-of-document token is the token that ends a text according to the model's files in the
    same folder. If these files do not name such a token, the first name in END_OF_DOCUMENT that is
    in the vocabulary is used. If none of these names is in the vocabulary, a new id after the
    vocabulary is used. The names of special tokens in texts are encoded as plain text, except by
    `encode_marked`.
    """

    def __init__(self, path: str | Path):
        """Load the file `path`. Raise InputError if the file is not a tokenizer.json, or if a file
        of its model is damaged."""
        # Switch off the threads of the library, because several processes encode in parallel. With
        # threads in each process, there would be more threads than cores.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        path = Path(path)
        try:
            content = read_file(path)
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises Exception for such files
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
        end = _named_end(path.parent, vocabulary)
        if end is None:
            end = next((vocabulary[text] for text in END_OF_DOCUMENT if text in vocabulary), known)
        self.eod_id = end
        self.vocab_size = max(known, self.eod_id + 1)
        self.name = path.name
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._dtype = token_dtype(self.vocab_size)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special = frozenset(token.content for token in added if token.special)

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the token ids of each text, and the index of the first character of each token.
        The names of special tokens are encoded as special tokens. Raise InputError for a text that
        cannot be encoded."""
        self._tokenizer.encode_special_tokens = False
        try:
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        # the library raises the class Exception, for example for a character without a token
        except Exception as error:
            raise InputError(f"tokenizer {self.name}: cannot encode a text: {error}") from error
        finally:
            self._tokenizer.encode_special_tokens = True
        marked = []
        for encoding in encodings:
            starts = np.array([start for start, _ in encoding.offsets], np.int64)
            marked.append((np.array(encoding.ids, self._dtype), starts))
        return marked

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text. Raise InputError for a text that cannot be encoded."""
        try:
            # `encode_batch_fast` does not compute the offsets of tokens, which are not needed here
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        # the library raises the class Exception, for example for a character without a token
        except Exception as error:
            raise InputError(f"tokenizer {self.name}: cannot encode a text: {error}") from error
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of token ids, including special tokens."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)


class GigatokenTokenizer(HuggingFaceTokenizer):
    """A tokenizer from a `tokenizer.json` file that uses the library gigatoken. The tokenizer gives
    the same tokens as `HuggingFaceTokenizer`, but is much faster, because it caches words.

    gigatoken would encode the name of a special token in a text as this token. So texts that
    contain such a name are encoded with the library `tokenizers`. As a check, the beginning of each
    batch is encoded with both libraries, and the results are compared.
    """

    def __init__(self, path: str | Path):
        """Load the file `path`. Raise InputError if the library is missing or does not support this
        tokenizer."""
        super().__init__(path)
        try:
            import gigatoken
        except ImportError as error:
            raise InputError(f"tokenizer {GIGATOKEN}{path} needs gigatoken: {MISSING}") from error
        self._open = partial(gigatoken.Tokenizer.from_json, self._tokenizer.to_str())
        special = sorted(map(re.escape, self.special))
        # if there are no special tokens, use the pattern (?!), which matches nowhere
        self._special = re.compile("|".join(special) or r"(?!)")
        try:
            self._fast = self._open()
        # catch every exception, because the errors for unsupported tokenizers have no common base
        # class
        except Exception as error:
            raise InputError(
                f"tokenizer {GIGATOKEN}{path}: {error}; try it without {GIGATOKEN}"
            ) from error
        self._characters = 0  # number of encoded characters since the cache was emptied

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text. Raise InputError if the results of the two libraries
        differ."""
        slow = [number for number, text in enumerate(texts) if self._special.search(text)]
        ids = dict(zip(slow, super().encode([texts[number] for number in slow]), strict=True))
        fast = [number for number in range(len(texts)) if number not in ids]
        for number in fast[:1]:
            self._compare(texts[number][:_COMPARED_CHARACTERS])
        self._characters += sum(map(len, texts))
        if self._characters > _RENEWED_CHARACTERS:
            self._fast = self._open()
            self._characters = 0
        ids |= {number: self._fast.encode(texts[number]).astype(self._dtype) for number in fast}
        return [ids[number] for number in range(len(texts))]

    def _compare(self, text: str) -> None:
        if not np.array_equal(self._fast.encode(text), super().encode([text])[0]):
            raise InputError(
                f"tokenizer {GIGATOKEN}{self.name}: gives other tokens than without {GIGATOKEN}, "
                f"for the text that begins with {text[:40]!r}; use it without"
            )


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Return the tokenizer `name`. The name is `bytes`, `tiktoken:NAME`, `gigatoken:FILE`, the name
    of a model on the Hugging Face hub, or the path of a file: a SentencePiece `.model` file or a
    `tokenizer.json` file.

    Raise InputError if the tokenizer cannot be loaded, or if an optional library is not installed.
    """
    if str(name) == BYTES:
        return ByteTokenizer()
    if str(name).startswith(TIKTOKEN):
        return TiktokenTokenizer(str(name).removeprefix(TIKTOKEN), END_OF_DOCUMENT)
    path = tokenizer_file(str(name))
    assert path is not None, "the names without a file are handled above"
    files = (path, *(path.parent / file for file in (TOKENIZER_CONFIG, *NAMING)))
    state = tuple(
        (file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()
    )
    return _load_file(path, str(name).startswith(GIGATOKEN), state)


# the result is cached, because a process asks for its tokenizer twice, and loading a large
# vocabulary takes half a second
@lru_cache(1)
def _load_file(path: Path, fast: bool, state: tuple[tuple[int, int], ...]) -> Tokenizer:
    """Load the tokenizer in the file `path`. If `fast` is True, use the library gigatoken. `state`
    contains the sizes and modification times of all files of the tokenizer. The function has the
    argument `state` only because all arguments are part of the cache key, so that changed files are
    loaded again."""
    if fast:
        return GigatokenTokenizer(path)
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    return HuggingFaceTokenizer(path)


def _named_end(folder: Path, vocabulary: Mapping[str, int]) -> int | None:
    """Return the id that ends a text, according to the files in a tokenizer's folder. If the
    vocabulary has the `eos_token` of TOKENIZER_CONFIG, this is the id of that token. Otherwise it
    is the first `eos_token_id` in the files NAMING that is in the vocabulary. Return None if the
    files name no token of the vocabulary. Raise InputError for a damaged file."""
    if (folder / TOKENIZER_CONFIG).is_file():
        token = json_object(folder / TOKENIZER_CONFIG).get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str) and token in vocabulary:
            return vocabulary[token]
    known = set(vocabulary.values())
    for path in (folder / name for name in NAMING if (folder / name).is_file()):
        ids = json_object(path).get("eos_token_id")
        if not isinstance(ids, list):
            ids = [ids]
        for number in ids:
            if isinstance(number, int) and number in known:
                return number
    return None


def tokenizer_file(name: str) -> Path | None:
    """Return the file of the tokenizer `name`, or None if the tokenizer has no file. The name may
    be a folder with a tokenizer.json or a tokenizer.model. The tokenizer of a model on the Hugging
    Face hub is downloaded. Raise InputError if the download fails."""
    if name == BYTES or name.startswith(TIKTOKEN):
        return None
    file = name.removeprefix(GIGATOKEN)
    if is_hub_name(file):
        return downloaded(file, "model", HUB_FILES) / "tokenizer.json"
    path = Path(file)
    if path.is_dir():
        files = (path / "tokenizer.json", path / "tokenizer.model")
        return next((file for file in files if file.is_file()), files[0])
    return path


def in_short_words(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, cut so that no word has more than MOST_LETTERS characters. At the end, print
    a note if words were cut."""
    cuts = 0
    for text in texts:
        start = 0
        for long in LONG_WORD.finditer(text):
            yield text[start : long.end()]
            start = long.end()
            cuts += 1
        yield text[start:]
    if cuts:
        note(
            f"note: for the training, words were cut at {counted(cuts, 'place')}, because words of "
            f"more than {MOST_LETTERS} characters would take very long"
        )


def train_bpe(texts: Iterable[str], vocab_size: int) -> tuple[str, int]:
    """Train a byte-level BPE tokenizer (Radford et al. 2019, section 2.2) with the special token
    <|endoftext|>.

    Return the content of the new tokenizer.json, and the size of its vocabulary. The size is less
    than `vocab_size` if the texts have too few different pairs of tokens. The same texts always
    give the same tokenizer. Words of more than MOST_LETTERS characters are cut, and a note says how
    many. Raise InputError if `vocab_size` is not between MIN_VOCAB_SIZE and MAX_VOCAB_SIZE.
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
    tokenizer.train_from_iterator(in_short_words(texts), trainer)
    return tokenizer.to_str(pretty=True), tokenizer.get_vocab_size()
