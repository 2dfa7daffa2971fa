"""Shards of bytes, document by document, for tests that must know the text."""

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np

from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.data.shards import Dataset

WORDS = ("one", "two_2", "hundred", "of", "a", "thousand", "ships", "\u00e9t\u00e9", "sailed")
END, VOCAB_SIZE = 256, 257


def text(length: int, seed: int) -> str:
    """Return words, blanks and commas of at least `length` characters."""
    chosen = random.Random(seed)
    parts: list[str] = []
    while sum(map(len, parts)) < length:
        parts += [chosen.choice(WORDS), chosen.choice([" ", " ", ", "])]
    return "".join(parts)


def tokens_of(document: str) -> np.ndarray:
    """Return the bytes of a document and the end."""
    return np.array([*document.encode(), END])


def byte_shards(folder: Path, shards: list[list[str]], tokenizer: str = "bytes") -> Dataset:
    """Write one shard for each list of documents: their bytes, and an end after each document."""
    folder.mkdir()
    digest = hashlib.sha256(tokenizer.encode()).hexdigest()
    for number, documents in enumerate(shards):
        ids = [tokens_of(document) for document in documents]
        path = folder / f"shard-{number:05d}.h5"
        with ShardWriter(path, tokenizer, digest, vocab_size=VOCAB_SIZE, eod_id=END) as writer:
            writer.write(np.concatenate(ids), np.cumsum([len(one) for one in ids]))
    return Dataset(folder)


def metaspace(texts: list[str]) -> Any:
    """Return a tokenizer like SentencePiece's, trained on `texts`.

    A space is part of the word after it, and the first space of a text is not decoded.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(vocab_size=99, special_tokens=special, show_progress=False)
    made.train_from_iterator(texts, trainer)
    return made
