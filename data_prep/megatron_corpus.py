"""A corpus of Megatron-LM's indexed datasets, whose documents are already tokenized."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.corpus import Work
from data_prep.encode import Encoded, document_share
from data_prep.megatron import MegatronIndex, TokenBlock, bin_path, idx_path
from data_prep.state import CorpusCounters, files_identity
from data_prep.vocabulary import Vocabulary, load_tokenizer, tokenizer_file
from ptdmpi.config import InputError
from ptdmpi.data.header import token_dtype


@dataclass(frozen=True)
class GivenVocabulary:
    """A vocabulary without a tokenizer: only its size and its end-of-document id are known."""

    name: str
    sha256: str
    vocab_size: int
    eod_id: int


def given_vocabulary(vocab_size: int, eod_id: int) -> GivenVocabulary:
    """Return a vocabulary that is defined by two numbers instead of a tokenizer's file.

    Its hash consists of zeros and the two numbers, so that datasets with the same numbers can be
    used together. Raise InputError if the numbers contradict each other.
    """
    if not 0 <= eod_id < vocab_size <= 1 << 32:
        raise InputError(
            f"--eod-id {eod_id} and --vocab-size {vocab_size}: 0 <= eod-id < vocab-size <= 2^32"
        )
    sha256 = f"{vocab_size:x}{eod_id:016x}".rjust(64, "0")
    return GivenVocabulary(f"unknown-{vocab_size}", sha256, vocab_size, eod_id)


class MegatronCorpus:
    """A corpus in which each group is an indexed dataset. An end-of-document token is added to each
    document that does not end with one.
    """

    counted = ("documents", "empty_documents", "eods_added", "train_tokens", "valid_tokens")

    def __init__(
        self,
        prefixes: Sequence[str],
        tokenizer: str | None,
        given: GivenVocabulary | None,
        valid_fraction: float,
    ):
        """Open the datasets. The vocabulary is `given`; if `given` is None, it is the vocabulary of
        `tokenizer`. Raise InputError for a prefix or a vocabulary that cannot be used."""
        if (tokenizer is None) == (given is None):
            raise InputError("give either --tokenizer, or --vocab-size and --eod-id")
        self.vocabulary: Vocabulary = given or load_tokenizer(str(tokenizer))
        self.tokenizer_file = None if tokenizer is None else tokenizer_file(tokenizer)
        self._valid_fraction = valid_fraction
        self._prefixes = [_prefix(text) for text in prefixes]
        files = [bin_path(prefix).resolve() for prefix in self._prefixes]
        for number, prefix in enumerate(self._prefixes):
            if files[number] in files[:number]:
                raise InputError(f"{prefix}: given twice")
        self.group_bytes = [MegatronIndex(prefix).bin_bytes for prefix in self._prefixes]

    def identity(self) -> dict[str, Any]:
        """Return the vocabulary and the properties of the files that determine the tokens."""
        paths = [path for prefix in self._prefixes for path in (bin_path(prefix), idx_path(prefix))]
        states = [(path.name, path.stat()) for path in paths]
        return {
            "tokenizer": self.vocabulary.name,
            "tokenizer_sha256": self.vocabulary.sha256,
            "format": "megatron",
            **files_identity((name, at.st_size, at.st_mtime_ns) for name, at in states),
        }

    def preparations(self, work: Work, folder: Path) -> Sequence[Callable[[], None]]:
        """Return no functions, because this corpus needs no preparation."""
        return ()

    def encoded(self, work: Work) -> Iterator[Encoded]:
        """Yield the encoded blocks of each group in `work`. A block has the tokens of some complete
        documents, or a piece of a long document. Blocks that an earlier run has already written to
        finished shards are left out. Raise InputError for a damaged dataset and for an id outside
        the vocabulary."""
        for group in work.groups:
            first = work.first_block(group)
            start = 0  # index of the block's first token among the tokens of all documents
            index = MegatronIndex(self._prefixes[group])
            for number, block in enumerate(index.blocks()):
                work.advance(block.tokens.size * index.dtype.itemsize)
                if number >= first:
                    self._check(index, block, start)
                    yield self._encode(group, number, block)
                start += block.tokens.size

    def _check(self, index: MegatronIndex, block: TokenBlock, start: int) -> None:
        """Raise InputError for an id outside the vocabulary. This method must be called before the
        ids are converted to the element type of the shards, because illegal ids may not fit into
        this type."""
        tokens = block.tokens
        size = self.vocabulary.vocab_size
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < size:
            at = int(np.argmax((tokens < 0) | (tokens >= size)))
            raise InputError(
                f"{bin_path(index.prefix)}: token {start + at} of the documents has id "
                f"{tokens[at]}, outside the vocabulary of {size}"
            )

    def _encode(self, group: int, index: int, block: TokenBlock) -> Encoded:
        tokens = block.tokens.astype(token_dtype(self.vocabulary.vocab_size), copy=False)
        full = block.lengths > 0
        lengths = block.lengths[full]
        begins = np.ones(lengths.size, bool)
        ended = np.ones(lengths.size, bool)
        held_out = np.zeros(lengths.size, bool)
        if lengths.size:
            begins[0] = block.first
            ended[-1] = block.last
        ends = np.cumsum(lengths)
        bare = tokens[ends - 1] != self.vocabulary.eod_id
        # the hash does not include the end-of-document token, so that a document has the same hash
        # with and without this token
        texts = ends - (ended & ~bare)
        if self._valid_fraction:
            bounds = zip((ends - lengths).tolist(), texts.tolist(), strict=True)
            shares = [document_share(tokens[start:end]) for start, end in bounds]
            held_out = (np.array(shares) < self._valid_fraction) & begins
        bare &= ended
        if bare.any():
            tokens = np.insert(tokens, ends[bare], self.vocabulary.eod_id)
        return Encoded(
            group=group,
            index=index,
            tokens=tokens,
            lengths=lengths + bare,
            begins=begins,
            ended=ended,
            held_out=held_out,
            counters=CorpusCounters(
                documents=int(ended.sum()),
                empty_documents=block.lengths.size - lengths.size,
                eods_added=int(bare.sum()),
            ),
        )


def _prefix(text: str) -> Path:
    """Return the PREFIX for `text`, which may also be the name of the .bin or .idx file."""
    path = Path(text)
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    return path
