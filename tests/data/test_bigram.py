"""The bigram baseline against its definition, written out with plain loops."""

import math
from collections import Counter

import numpy as np
import pytest

from ptdmpi.config import InputError
from ptdmpi.data import bigram
from ptdmpi.data.bigram import Bigram
from ptdmpi.data.shard_writer import ShardWriter
from ptdmpi.data.shards import Dataset


def _dataset(folder, tokens, vocab_size):
    with ShardWriter(folder / "a.h5", "t", "0" * 64, vocab_size=vocab_size, eod_id=0) as writer:
        writer.write(tokens, np.array([len(tokens)]))
    return Dataset(folder)


@pytest.mark.parametrize("chunk_tokens", [64, 1 << 22])
def test_probabilities_are_those_of_the_definition(tmp_path, monkeypatch, chunk_tokens):
    monkeypatch.setattr(bigram, "CHUNK_TOKENS", chunk_tokens)
    size = 11
    tokens = np.random.default_rng(5).geometric(0.35, 400) % (size - 1)  # id 10 never occurs
    model = Bigram([_dataset(tmp_path, tokens, size)])
    pairs = Counter(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))
    single = Counter(tokens.tolist())
    counts = Counter(pairs.values())
    discount = counts[1] / (counts[1] + 2 * counts[2])
    for v in range(size):
        followers = {w: n for (a, w), n in pairs.items() if a == v}
        total = sum(followers.values())
        whole = 0.0
        for w in range(size):
            unigram = (single[w] + 1) / (len(tokens) + size)
            if total:
                kept = max(followers.get(w, 0) - discount, 0) / total
                expected = kept + discount * len(followers) / total * unigram
            else:
                expected = unigram
            whole += expected
            loss = model.loss(np.array([v]), np.array([w]))
            assert loss == pytest.approx(-math.log(expected), rel=1e-12)
        assert whole == pytest.approx(1.0, rel=1e-12)


def test_a_vocabulary_too_large_is_refused(tmp_path):
    dataset = _dataset(tmp_path, np.arange(100), bigram.LARGEST_VOCABULARY + 1)
    with pytest.raises(InputError, match="legal up to 8192"):
        Bigram([dataset])
