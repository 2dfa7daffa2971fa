"""Perplexity on token shards, computed by a window that slides over each shard."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ptdmpi.config import InputError, SharedInputError
from ptdmpi.data.shards import Dataset
from ptdmpi.evaluate.scoring import rows_of
from ptdmpi.generate.sampling import NOT_FINITE
from ptdmpi.inference.model import InferenceModel

_OPEN_WEIGHTS = 512  # maximum number of shards whose weights are mapped at a time


class Window(NamedTuple):
    """A range of tokens of a shard that is scored in one forward pass.

    The inputs of a window begin with token `first`, and its labels end before token `end`. Only
    labels from token `scored` on are scored.
    """

    shard: int
    first: int
    end: int
    scored: int


def windows(tokens: int, shard: int, seq_length: int, stride: int) -> Iterator[Window]:
    """Yield the windows of a shard of `tokens` tokens. Together, the windows score each token
    except the first exactly once.

    The first window scores all of its labels. Each later window scores its last `stride` labels
    (fewer at the end of the shard). The scored labels of all windows except the first have at least
    seq_length - stride tokens of context.
    """
    scored = 1
    while scored < tokens:
        end = scored + stride
        if scored == 1:
            end = seq_length + 1
        end = min(tokens, end)
        yield Window(shard, max(0, end - 1 - seq_length), end, scored)
        scored = end


def perplexity(
    model: InferenceModel, dataset: Dataset, stride: int | None = None, words: int | None = None
) -> dict[str, Any]:
    """Return a table with the perplexity over all tokens of the shards: exp(mean negative
    log-likelihood). The table also has the number of tokens and the mean in nats. Every rank gets
    the table. In shards of conversations, only the answers are scored, because only their tokens
    count in the loss of a training. As in training, no conversation attends to another
    conversation. The entry "scored" of the result says which tokens were scored: "all tokens" or
    "answers".

    `words` is the number of words in the original text. If `words` is given, the result also has
    the perplexity per word: exp(summed negative log-likelihood / number of words). The perplexity
    per word allows comparing models with different tokenizers (Shoeybi et al. 2019, arXiv
    1909.08053, section 5.3 and appendix E.1). `stride` is the number of tokens that each window
    after the first scores; Shoeybi et al. use a stride of 32. If `stride` is None, the stride is
    `seq_length`. This stride is the fastest, because then only the last window of a shard has
    tokens that another window has also processed. Every rank calls this function. Raise InputError
    on every rank if `stride` is not legal, if `words` is given for conversations, if the dataset
    does not fit the model, or if a probability is NaN.
    """
    if stride is None:
        stride = model.seq_length
    if not 1 <= stride <= model.seq_length:
        raise SharedInputError(f"stride = {stride}; legal: 1 to seq_length = {model.seq_length}")
    if dataset.vocab_size > model.vocab_size:
        raise SharedInputError(
            f"{dataset.directory} has a vocabulary of {dataset.vocab_size}, the model one of "
            f"{model.vocab_size}: not the same tokenizer"
        )
    if words is not None and dataset.row_length:
        raise SharedInputError(
            f"--words: {dataset.directory} has conversations, of which only the answers are "
            "scored; legal: without --words"
        )
    total, tokens = _sums(model, dataset, stride)
    if not tokens:
        lack = "part of an answer" if dataset.row_length else "shard of two tokens or more"
        raise SharedInputError(f"{dataset.directory} has no {lack}")
    if math.isnan(total):
        raise SharedInputError(f"{dataset.directory}: {NOT_FINITE}")
    result = {
        "dataset": str(dataset.directory),
        "scored": "answers" if dataset.row_length else "all tokens",
        "tokens": tokens,
        "stride": stride,
        "nats_per_token": total / tokens,
        "perplexity": _exp(total / tokens),
    }
    if words is not None:
        result |= {"words": words, "word_perplexity": _exp(total / words)}
    return result


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def _sums(model: InferenceModel, dataset: Dataset, stride: int) -> tuple[float, int]:
    """Return two values, each summed over all ranks: the negative log-likelihood of the scored
    tokens in nats, and the number of scored tokens."""
    data = model.axes["data"]
    groups = _groups(
        _windows_of(dataset, model.seq_length, stride), rows_of(model.seq_length, model)
    )
    weights_of = lru_cache(_OPEN_WEIGHTS)(dataset.weights)
    total = 0.0
    tokens = 0
    for group in islice(groups, data.rank, None, data.size):
        answer = model.log_probabilities(*_batch(dataset, group, model))
        if answer is None:
            continue
        values = answer[0].double().cpu()
        for column, window in enumerate(group):
            labels = slice(window.scored - 1 - window.first, window.end - 1 - window.first)
            scores = values[labels, column]
            if dataset.row_length:
                weights = weights_of(window.shard)[window.scored : window.end]
                scores = scores[torch.from_numpy(weights > 0)]
            total -= float(scores.sum())
            tokens += scores.numel()
    model.finish()
    sums = data.all_gather_object(model.share((total, tokens)))
    return sum(part for part, _ in sums), sum(count for _, count in sums)


def _windows_of(dataset: Dataset, seq_length: int, stride: int) -> Iterator[Window]:
    """Yield the windows of all shards of a dataset. If the shards have packed rows, as shards of
    conversations do, no window contains tokens of two documents, and windows in which no label
    counts in the loss are left out."""
    for shard, header in enumerate(dataset.headers):
        if not dataset.row_length:
            yield from windows(header.tokens, shard, seq_length, stride)
            continue
        weights = dataset.weights(shard)
        for start, stop in pairwise(dataset.documents(shard).tolist()):
            for window in windows(stop - start, shard, seq_length, stride):
                first, end, scored = (start + at for at in window[1:])
                if weights[scored:end].any():
                    yield Window(shard, first, end, scored)


def _groups(all_windows: Iterator[Window], rows: int) -> Iterator[list[Window]]:
    """Yield lists of up to `rows` windows; each list forms one batch."""
    while group := list(islice(all_windows, rows)):
        yield group


def _batch(
    dataset: Dataset, group: Sequence[Window], model: InferenceModel
) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of the windows, each a tensor [tokens, windows]. Raise InputError
    for a token outside the vocabulary."""
    width = max(window.end - window.first for window in group)
    ids = np.zeros((width, len(group)), dtype=np.int64)
    for column, window in enumerate(group):
        tokens = dataset.shard_tokens(window.shard)[window.first : window.end]
        if tokens.max() >= model.vocab_size:
            path = dataset.headers[window.shard].path
            raise InputError(
                f"shard {path}: token id {tokens.max()} is outside the model's "
                f"vocabulary of {model.vocab_size}"
            )
        ids[: len(tokens), column] = tokens
    placed = torch.from_numpy(ids).to(model.device)
    return placed[:-1], placed[1:]
