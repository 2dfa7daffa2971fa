"""Tokenizers of two optional libraries: tiktoken's encodings and SentencePiece's models."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ptdmpi.base.disk import read_file
from ptdmpi.config import InputError
from ptdmpi.data.header import token_dtype

# A sample text, whose token ids are part of the hash of an encoding. If two encodings split texts
# into words by different regular expressions, the token ids of this text differ.
_PROBE = "I'll we'RE 12345678  x\t\n\n y\r\n...!? Ünïcode 日本語 "
MISSING = "pip install 'ptdmpi[corpus]' installs it"


class TiktokenTokenizer:
    """An encoding of the library tiktoken. The encoding is either one of OpenAI's encodings, whose
    files are in tiktoken's cache (TIKTOKEN_CACHE_DIR), or is defined by an installed `tiktoken_ext`
    package. The names of special tokens in a text are encoded as plain text."""

    def __init__(self, encoding: str, end_of_document: Sequence[str]):
        """Load the encoding. The end-of-document token is the first special token in
        `end_of_document` that the encoding has. If the encoding has none of these tokens, a new id
        after the vocabulary is used. Raise InputError if the library or the encoding is missing."""
        try:
            import tiktoken
        except ImportError as error:
            raise InputError(f"tokenizer tiktoken:{encoding} needs tiktoken: {MISSING}") from error
        try:
            self._encoding = tiktoken.get_encoding(encoding)
        # catch every exception, because the errors of the cache, the download and the registry have
        # no common base class
        except Exception as error:
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            raise InputError(
                f"tokenizer tiktoken:{encoding}: {reason}; legal: {tiktoken.list_encoding_names()} "
                "with their files in TIKTOKEN_CACHE_DIR"
            ) from error
        special = {name: self._encoding.encode_single_token(name) for name in self._special()}
        known = self._encoding.n_vocab
        self.eod_id = next((special[name] for name in end_of_document if name in special), known)
        self.vocab_size = max(known, self.eod_id + 1)
        self.name = f"tiktoken:{encoding}"
        self.sha256 = self._hash()
        self._dtype = token_dtype(self.vocab_size)

    def _special(self) -> list[str]:
        return sorted(self._encoding.special_tokens_set)

    def _hash(self) -> str:
        """Return a hash of the ids and bytes of all tokens, of the names of the special tokens, and
        of the token ids of a sample text. The hash does not depend on the files in which tiktoken
        stores the encoding."""
        digest = hashlib.sha256()
        for token in self._encoding.token_byte_values():
            rank = self._encoding.encode_single_token(token)
            digest.update(rank.to_bytes(4, "little") + token + b"\n")
        digest.update(" ".join(self._special()).encode())
        digest.update(self._encoding.encode_to_numpy(_PROBE).tobytes())
        return digest.hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text."""
        arrays = [self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]
        return [array.astype(self._dtype) for array in arrays]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of token ids. An end-of-document id that was added after the vocabulary
        has no text."""
        return self._encoding.decode([i for i in ids.tolist() if i < self._encoding.n_vocab])


class SentencePieceTokenizer:
    """A tokenizer from a SentencePiece `.model` file. The end-of-document token is the model's
    </s>; if the model has no </s>, a new id after the vocabulary is used."""

    def __init__(self, path: Path):
        """Load the file `path`. Raise InputError if the library SentencePiece is missing, or if the
        file is not a model of this library."""
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise InputError(f"tokenizer {path} needs sentencepiece: {MISSING}") from error
        self._model = SentencePieceProcessor()
        try:
            content = read_file(path)
            self._model.LoadFromSerializedProto(content)
        except (OSError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"tokenizer {path}: is not a SentencePiece model: {reason}") from error
        known = self._model.get_piece_size()
        self.eod_id = self._model.eos_id()
        if self.eod_id < 0:  # the model has no token </s>
            self.eod_id = known
        self.vocab_size = max(known, self.eod_id + 1)
        self.name = path.name
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._dtype = token_dtype(self.vocab_size)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text."""
        lists = self._model.encode(list(texts), out_type=int, num_threads=1)
        return [np.array(ids, dtype=self._dtype) for ids in lists]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of token ids, with </s> for an end of document."""
        pieces = np.split(ids, np.flatnonzero(ids == self.eod_id))
        texts = [self._model.decode(piece[piece != self.eod_id].tolist()) for piece in pieces]
        return "</s>".join(texts)
