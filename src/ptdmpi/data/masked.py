"""Samples of masked language models: whole words hidden, two segments in order or swapped.

The objectives of BERT (Devlin et al. 2019, arXiv 1810.04805) as Megatron-LM trains it (Shoeybi et
al. 2019, section 5.3): n-grams of whole words are masked, and the order of two segments is asked
for instead of whether the second follows (Lan et al. 2020, arXiv 1909.11942, sections 3.1, 4.1).
Every choice is a pure function of (seed, global sample number).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ptdmpi.config import DataConfig, ModelConfig
from ptdmpi.data.batches import Microbatch
from ptdmpi.data.documents import Windows
from ptdmpi.data.shards import Dataset
from ptdmpi.data.words import read_vocabulary

LONGEST_WORD = 16  # tokens; what is longer counts as several words
MASKED, DRAWN = 0.8, 0.9  # below: the mask token; below: a random token; else left as it is


def predictions(fraction: float, tokens: int) -> int:
    """Masked tokens of a text of so many: at least one, and rounded."""
    return max(1, round(fraction * tokens)) if tokens else 0


@dataclass(frozen=True)
class Sample:
    """One sample: `ids` and `types` of its tokens, no padding; the `masked` positions and the
    `labels` that stood there; the `order` of its segments: 0, 1 swapped, -1 one segment only."""

    ids: np.ndarray
    types: np.ndarray
    masked: np.ndarray
    labels: np.ndarray
    order: int


class MaskedSamples:
    """Makes samples out of windows of tokens."""

    def __init__(self, model: ModelConfig, data: DataConfig, dataset: Dataset, seed: int) -> None:
        """`dataset` is any of those that the windows are from; raises InputError if its tokenizer
        does not tell words apart."""
        self.vocabulary = read_vocabulary(dataset, data.whole_words)
        self.eod_id, self.seed = dataset.eod_id, seed
        self.seq_length, self.sentence_order = model.seq_length, model.sentence_order
        self.last_type = 0 if model.token_types == 1 else 1  # of a single type are both segments
        self.fraction = data.mask_fraction
        self.most = model.predictions(data.mask_fraction)
        # n with probability in proportion to 1 / n (Lan et al. 2020, section 4.1)
        shares = 1.0 / np.arange(1, data.mask_ngram + 1)
        self.ngram_limits = np.cumsum(shares / shares.sum())

    def __call__(self, windows: Windows, microbatch: Microbatch) -> Microbatch:
        """The microbatch of the windows' tokens as one of masked samples."""
        numbers = windows.documents(microbatch.sample_ids)[:, :-1]
        rows = zip(microbatch.sample_ids.tolist(), microbatch.inputs, numbers, strict=True)
        samples = [self.sample(window, of, number) for number, window, of in rows]
        count, length = len(samples), self.seq_length
        ids = np.full((count, length), self.eod_id, dtype=np.int64)
        types, padding = np.zeros_like(ids), np.ones_like(ids)
        masked = np.zeros((count, self.most), dtype=np.int64)
        labels, weights = np.zeros_like(masked), np.zeros(masked.shape, dtype=np.float32)
        for row, sample in enumerate(samples):
            ids[row, : len(sample.ids)] = sample.ids
            types[row, : len(sample.ids)] = sample.types
            padding[row, : len(sample.ids)] = 0
            masked[row, : len(sample.masked)] = sample.masked
            labels[row, : len(sample.masked)] = sample.labels
            weights[row, : len(sample.masked)] = 1.0
        orders = np.array([sample.order for sample in samples], dtype=np.int64)
        if microbatch.loss_mask is not None:  # rows that only fill up a validation
            weights *= microbatch.loss_mask[:, :1]
            orders[microbatch.loss_mask[:, 0] == 0.0] = -1
        return microbatch._replace(
            inputs=ids,
            labels=labels,
            loss_mask=weights,
            documents=padding if padding.any() else None,
            masked=masked,
            types=types,
            order=orders,
        )

    def sample(self, window: np.ndarray, documents: np.ndarray, number: int) -> Sample:
        """The sample of a window of tokens and their documents [n], of global number `number`.

        Its text is what the window has of one document: of that of a token drawn at random, so that
        in the long run every token is read.
        """
        # as many for each sample of a length, used or not: no choice shifts the numbers of another
        draws = _uniforms(self.seed, number, 3 + 4 * len(window))
        text = self._text(window, documents, draws[0])
        starts = self._word_starts(text)
        segments, order = self._segments(text, starts, draws[1:3])
        special = self.vocabulary
        ids, types, words = [np.array([special.begin])], [], []
        for place, (begin, end) in enumerate(segments):
            at = 1 + place + sum(stop - start for start, stop in segments[:place])
            own = np.flatnonzero(starts[begin:end]) + at
            words.append((own, at + end - begin))
            ids += [text[begin:end], np.array([special.separator])]
            types += [min(place, self.last_type)] * (end - begin + 1 + (place == 0))
        tokens = np.concatenate(ids)
        budget = min(self.most, predictions(self.fraction, len(text)))
        chances = draws[3:].reshape(4, -1)
        masked = self._choose(words, budget, chances[:2])
        labels = tokens[masked]
        tokens[masked] = self._hide(labels, chances[2:, : len(masked)])
        return Sample(tokens, np.array(types), masked, labels, order)

    def _text(self, window: np.ndarray, documents: np.ndarray, draw: float) -> np.ndarray:
        """One document's tokens, without the end of document."""
        places = np.flatnonzero(window != self.eod_id)
        if not places.size:
            return window[:0]
        text = window[documents == documents[places[int(draw * places.size)]]]
        inside = np.flatnonzero(text != self.eod_id)
        return text[: inside[-1] + 1]

    def _word_starts(self, text: np.ndarray) -> np.ndarray:
        """bool [n]; words longer than LONGEST_WORD, or than all that may be masked, are cut."""
        starts = self.vocabulary.word_starts(text)
        longest = min(LONGEST_WORD, max(1, predictions(self.fraction, len(text))))
        places = np.arange(len(text))
        begins = np.maximum.accumulate(np.where(starts, places, 0))
        return (places - begins) % longest == 0

    def _segments(
        self, text: np.ndarray, starts: np.ndarray, draws: np.ndarray
    ) -> tuple[list[tuple[int, int]], int]:
        """Where in the text the segments stand, in the order of the sample, and that order."""
        cuts: np.ndarray | list[int]
        cuts = np.flatnonzero(starts[1:]) + 1 if self.sentence_order else []
        if not len(cuts):
            return [(0, len(text))], -1
        cut = int(cuts[int(draws[0] * len(cuts))])
        swapped = bool(draws[1] < 0.5)
        segments = [(0, cut), (cut, len(text))]
        return segments[::-1] if swapped else segments, int(swapped)

    def _choose(
        self, words: Sequence[tuple[np.ndarray, int]], budget: int, chances: np.ndarray
    ) -> np.ndarray:
        """Positions of `budget` tokens, or a few less: n-grams of whole words in a random order,
        each as long as it was drawn, or as fits. `words`: of each segment the first positions of
        its words, and its end."""
        first = np.concatenate([own for own, _ in words])
        last = np.concatenate([np.append(own[1:], end)[: len(own)] for own, end in words])
        # the word behind the last one of the same segment
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
        return np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)

    def _hide(self, labels: np.ndarray, chances: np.ndarray) -> np.ndarray:
        """What stands in place of masked tokens: 80 % the mask, 10 % any token, 10 % the same."""
        drawn = (chances[1] * self.vocabulary.drawn).astype(np.int64)
        shown = np.where(chances[0] < DRAWN, drawn, labels)
        return np.where(chances[0] < MASKED, self.vocabulary.mask, shown)


def _uniforms(seed: int, number: int, count: int) -> np.ndarray:
    """`count` numbers in [0, 1) of one sample, the same everywhere: Philox counts, it keeps no
    state (Salmon et al. 2011)."""
    # the seed and the sample are the key: no two samples share a stream
    key = np.array([seed & (2**64 - 1), number], dtype=np.uint64)
    return (np.random.Philox(key=key).random_raw(count) >> np.uint64(11)) * 2.0**-53
