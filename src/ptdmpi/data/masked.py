"""Samples for masked language models: masked words, and two segments that are in order or swapped.

The model is trained on the objectives of BERT (Devlin et al. 2019, arXiv 1810.04805) in the form of
Megatron-LM (Shoeybi et al. 2019, section 5.3). N-grams of complete words are masked. The model
predicts whether two segments of a text are in order or swapped (Lan et al. 2020, arXiv 1909.11942,
sections 3.1, 4.1). In contrast, BERT predicted whether the second segment follows the first. Every
random choice is a pure function of (seed, global sample number).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ptdmpi.config import DataConfig, ModelConfig
from ptdmpi.data.batches import MicrobatchRows
from ptdmpi.data.documents import Windows
from ptdmpi.data.shards import Dataset
from ptdmpi.data.words import read_vocabulary

LONGEST_WORD = 16  # maximum length in tokens; a longer word is treated as several words.
# A random number in [0, 1) decides what replaces a masked token. If the number is below MASKED, the
# mask token replaces it. If the number is between MASKED and DRAWN, a random token replaces it.
# Otherwise, the token stays.
MASKED = 0.8
DRAWN = 0.9


def predictions(fraction: float, tokens: int) -> int:
    """Return how many of `tokens` tokens are masked: `fraction` times `tokens`, rounded, but at
    least one. Return 0 if `tokens` is 0."""
    if tokens == 0:
        return 0
    return max(1, round(fraction * tokens))


@dataclass(frozen=True)
class Sample:
    """One sample of a masked language model, with the `ids` and the token `types` of its tokens (no
    padding), and the `masked` positions. `labels` are the original tokens at the masked positions.
    `order` is 0 for segments in order, 1 for swapped segments and -1 for a single segment."""

    ids: np.ndarray
    types: np.ndarray
    masked: np.ndarray
    labels: np.ndarray
    order: int


class MaskedSamples:
    """A callable object that makes masked samples from windows of tokens."""

    def __init__(self, model: ModelConfig, data: DataConfig, dataset: Dataset, seed: int) -> None:
        """Prepare the masking. `dataset` is one of the datasets from which the windows come; all
        have the same tokenizer. Raise InputError if complete words must be masked, but the
        tokenizer's file does not show where words begin."""
        self.vocabulary = read_vocabulary(dataset, data.whole_words)
        self.eod_id = dataset.eod_id
        self.seed = seed
        self.seq_length = model.seq_length
        self.sentence_order = model.sentence_order
        # if the model has only one token type, both segments have type 0
        self.last_type = 0 if model.token_types == 1 else 1
        self.fraction = data.mask_fraction
        self.most = model.predictions(data.mask_fraction)
        # an n-gram of n words has a probability proportional to 1 / n (Lan et al. 2020, section
        # 4.1)
        shares = 1.0 / np.arange(1, data.mask_ngram + 1)
        self.ngram_limits = np.cumsum(shares / shares.sum())

    def __call__(self, windows: Windows, microbatch: MicrobatchRows) -> MicrobatchRows:
        """Return the masked samples made from a microbatch of windows."""
        documents = windows.documents(microbatch.samples)[:, :-1]
        rows = zip(microbatch.samples.tolist(), microbatch.inputs, documents, strict=True)
        samples = [self.sample(window, own, number) for number, window, own in rows]
        ids = np.full((len(samples), self.seq_length), self.eod_id, dtype=np.int64)
        types = np.zeros_like(ids)
        padding = np.ones_like(ids)
        masked = np.zeros((len(samples), self.most), dtype=np.int64)
        labels = np.zeros_like(masked)
        weights = np.zeros(masked.shape, dtype=np.float32)
        for row, sample in enumerate(samples):
            ids[row, : len(sample.ids)] = sample.ids
            types[row, : len(sample.ids)] = sample.types
            padding[row, : len(sample.ids)] = 0
            masked[row, : len(sample.masked)] = sample.masked
            labels[row, : len(sample.masked)] = sample.labels
            weights[row, : len(sample.masked)] = 1.0
        orders = np.array([sample.order for sample in samples], dtype=np.int64)
        # A row with weight 0 only fills up a validation batch, and must not contribute to any loss.
        # So its labels get the weight 0, and its order is -1, for which there is no loss.
        if microbatch.weights is not None:
            weights *= microbatch.weights[:, :1]
            orders[microbatch.weights[:, 0] == 0.0] = -1
        return microbatch._replace(
            inputs=ids,
            labels=labels,
            weights=weights,
            documents=padding if padding.any() else None,
            masked=masked,
            types=types,
            order=orders,
        )

    def sample(self, window: np.ndarray, documents: np.ndarray, number: int) -> Sample:
        """Return the sample with the global number `number`. The sample is made from a window of n
        tokens: `window` has the ids of these tokens, and `documents` has the number of each token's
        document (both int [n]).

        The sample's text is the part of one document that is inside the window. To choose the
        document, a random token of the window is drawn, and the document that contains this token
        is taken. Long documents are therefore chosen more often, and over many epochs every
        document is used.
        """
        # Draw a number of random numbers that depends only on the length of the window, even if
        # some of them are not used. Each choice then always has the same random numbers, whatever
        # the earlier choices were.
        draws = _uniforms(self.seed, number, 3 + 4 * len(window))
        text = self._text(window, documents, draws[0])
        starts = self._word_starts(text)
        segments, order = self._segments(text, starts, draws[1:3])
        special = self.vocabulary
        ids = [np.array([special.begin])]
        types = [0]  # the type of the special token at the beginning.
        # for each segment: the positions of the first tokens of its words, and its end
        words = []
        for place, (begin, end) in enumerate(segments):
            at = len(types)
            words.append((np.flatnonzero(starts[begin:end]) + at, at + end - begin))
            ids += [text[begin:end], np.array([special.separator])]
            types += [min(place, self.last_type)] * (end - begin + 1)
        tokens = np.concatenate(ids)
        budget = min(self.most, predictions(self.fraction, len(text)))
        chances = draws[3:].reshape(4, -1)
        masked = self._choose(words, budget, chances[:2])
        labels = tokens[masked]
        tokens[masked] = self._hide(labels, chances[2:, : len(masked)])
        return Sample(ids=tokens, types=np.array(types), masked=masked, labels=labels, order=order)

    def _text(self, window: np.ndarray, documents: np.ndarray, draw: float) -> np.ndarray:
        """Return the tokens of one randomly chosen document of the window, without the token for
        the end of the document. The random number `draw` selects the document."""
        places = np.flatnonzero(window != self.eod_id)
        if not places.size:
            return window[:0]
        text = window[documents == documents[places[int(draw * places.size)]]]
        inside = np.flatnonzero(text != self.eod_id)
        return text[: inside[-1] + 1]

    def _word_starts(self, text: np.ndarray) -> np.ndarray:
        """Return True for each token of `text` that begins a word, bool [n]. If a word has more
        than LONGEST_WORD tokens, or more tokens than may be masked, it is treated as several words.
        """
        starts = self.vocabulary.word_starts(text)
        longest = min(LONGEST_WORD, max(1, predictions(self.fraction, len(text))))
        places = np.arange(len(text))
        begins = np.maximum.accumulate(np.where(starts, places, 0))
        return (places - begins) % longest == 0

    def _segments(
        self, text: np.ndarray, starts: np.ndarray, draws: np.ndarray
    ) -> tuple[list[tuple[int, int]], int]:
        """Return the interval [begin, end) of each segment in the text, in the order of the
        segments in the sample, and the value of `Sample.order`. `starts` is True for each token
        that begins a word, and `draws` has random numbers in [0, 1)."""
        cuts = np.flatnonzero(starts[1:]) + 1
        if not self.sentence_order or not cuts.size:
            return [(0, len(text))], -1
        cut = int(cuts[int(draws[0] * len(cuts))])
        if draws[1] < 0.5:
            return [(cut, len(text)), (0, cut)], 1
        return [(0, cut), (cut, len(text))], 0

    def _choose(
        self, words: Sequence[tuple[np.ndarray, int]], budget: int, chances: np.ndarray
    ) -> np.ndarray:
        """Return the positions of the masked tokens. The number of masked tokens is `budget`, or a
        few less.

        The masked tokens are n-grams of complete words, chosen in random order. For each n-gram,
        the number of words n is drawn at random. Then n is reduced until the n-gram has at most as
        many tokens as are left of `budget`, ends inside the segment, and does not overlap an
        earlier n-gram. `words` has, for each segment, the positions of the first tokens of its
        words and the end of the segment. `chances` has random numbers, float [2, m], with m at
        least the number of words: the first row determines the order of the n-grams, and the second
        row their lengths.
        """
        first = np.concatenate([own for own, _ in words])
        last = np.concatenate([np.append(own[1:], end)[: len(own)] for own, end in words])
        # for each word, the index of the first word of the next segment, which an n-gram must not
        # reach
        limit = np.repeat(np.cumsum([len(own) for own, _ in words]), [len(own) for own, _ in words])
        grams = np.searchsorted(self.ngram_limits, chances[1, : len(first)], side="right") + 1
        taken = np.zeros(len(first), dtype=bool)
        for word in np.argsort(chances[0, : len(first)], kind="stable").tolist():
            if budget == 0:
                break
            stop = min(word + int(grams[word]), int(limit[word]))
            while stop > word and (last[stop - 1] - first[word] > budget or taken[word:stop].any()):
                stop -= 1
            if stop > word:
                taken[word:stop] = True
                budget -= int(last[stop - 1] - first[word])
        spans = [np.arange(first[word], last[word]) for word in np.flatnonzero(taken)]
        return np.concatenate([np.zeros(0, dtype=np.int64), *spans])

    def _hide(self, labels: np.ndarray, chances: np.ndarray) -> np.ndarray:
        """Return the tokens that the model reads in place of the masked tokens `labels`: the mask
        token for 80 % of the labels, a random token for 10 %, and the label itself for 10 % (Devlin
        et al. 2019, section 3.1). `chances` has the random numbers, float [2, n]."""
        drawn = (chances[1] * self.vocabulary.drawn).astype(np.int64)
        shown = np.where(chances[0] < DRAWN, drawn, labels)
        return np.where(chances[0] < MASKED, self.vocabulary.mask, shown)


def _uniforms(seed: int, number: int, count: int) -> np.ndarray:
    """Return `count` random numbers in [0, 1) for sample `number`. The numbers are the same on
    every machine. The random generator is Philox, which computes each number from a counter,
    without state (Salmon et al. 2011)."""
    # the key of the generator consists of seed and sample number, so that each sample has random
    # numbers of its own
    key = np.array([seed & (2**64 - 1), number], dtype=np.uint64)
    return (np.random.Philox(key=key).random_raw(count) >> np.uint64(11)) * 2.0**-53
