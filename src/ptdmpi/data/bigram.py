"""A bigram language model, as a baseline for validation losses. A trained model with a lower loss
has learned more than the statistics of pairs of tokens."""

from collections.abc import Iterable

import numpy as np

from ptdmpi.config import InputError
from ptdmpi.data.shards import Dataset, map_tokens

LARGEST_VOCABULARY = 8192  # with V = 8192 ids, the V^2 counts of 8 bytes take half a GiB.
CHUNK_TOKENS = 1 << 22  # the number of tokens that are counted by one call of numpy


class Bigram:
    """The estimate of P(next | token) by interpolated absolute discounting (Ney, Essen and
    Kneser 1994), fitted on every pair of neighbouring tokens of the datasets:

        P(w | v) = max(c(v,w) - D, 0) / c(v) + D T(v) / c(v) P(w),   D = n1 / (n1 + 2 n2)

    In this formula c(v) and c(v,w) are the counts of the token v and of the pair (v,w). T(v) is the
    number of distinct followers of v. n1 and n2 are the numbers of pairs seen once and twice. P(w)
    is the unigram estimate with one added to each count.
    """

    def __init__(self, datasets: Iterable[Dataset]) -> None:
        """Count the tokens and pairs in all shards of `datasets`, which must have the same
        vocabulary. Raise InputError if the vocabulary has more than LARGEST_VOCABULARY ids."""
        datasets = list(datasets)
        size = datasets[0].vocab_size
        if size > LARGEST_VOCABULARY:
            raise InputError(
                f"log.bigram_baseline with {size} token ids would need {size**2 * 8 >> 30} GiB; "
                f"legal up to {LARGEST_VOCABULARY}"
            )
        pairs = np.zeros(size * size, dtype=np.int64)
        single = np.zeros(size, dtype=np.int64)
        for dataset in datasets:
            for header in dataset.headers:
                _count(map_tokens(header), size, pairs, single)
        self.pairs = pairs.reshape(size, size)
        once = int((pairs == 1).sum())
        twice = int((pairs == 2).sum())
        # if no pair was seen exactly once, use this constant as the discount, because a discount of
        # 0 would give unseen pairs the probability 0
        self.discount = 0.5
        if once:
            self.discount = once / (once + 2 * twice)
        self.total = self.pairs.sum(axis=1)
        self.followers = (self.pairs > 0).sum(axis=1)
        # adding one to each count keeps every probability above 0, even for tokens that occur only
        # in the validation data
        self.unigram = (single + 1) / (single.sum() + size)

    def loss(self, inputs: np.ndarray, labels: np.ndarray) -> float:
        """Return the sum of -log P(label | input) in nats, over two integer arrays of the same
        shape."""
        total = np.maximum(self.total[inputs], 1)
        kept = np.maximum(self.pairs[inputs, labels] - self.discount, 0.0) / total
        spread = np.where(
            self.total[inputs] > 0, self.discount * self.followers[inputs] / total, 1.0
        )
        return float(-np.log(kept + spread * self.unigram[labels]).sum())


def _count(tokens: np.ndarray, size: int, pairs: np.ndarray, single: np.ndarray) -> None:
    """Count `tokens` (int [n], each below `size`). Add the count of each token to `single` (int64
    [size]), and the count of each pair of neighbours to `pairs` (int64 [size * size]). The index of
    a pair is its first token times `size` plus its second token."""
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS + 1].astype(np.int64)
        single += np.bincount(chunk[:CHUNK_TOKENS], minlength=size)
        pairs += np.bincount(chunk[:-1] * size + chunk[1:], minlength=size * size)
