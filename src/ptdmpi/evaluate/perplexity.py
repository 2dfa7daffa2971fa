"""Perplexity of token shards, by a window that slides over each of them."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptdmpi.config import InputError, SharedInputError
from ptdmpi.data.shards import Dataset
from ptdmpi.evaluate.scoring import rows_of
from ptdmpi.generate.sampling import NOT_FINITE
from ptdmpi.inference.model import InferenceModel

Window = tuple[int, int, int, int]  # shard, first input, labels until, first scored label


def windows(tokens: int, shard: int, seq_length: int, stride: int) -> Iterator[Window]:
    """Every token of a shard but the first is scored once. The first window scores all of its
    tokens, each further one its last `stride`, which have seq_length - stride tokens or more before
    them."""
    scored = 1
    while scored < tokens:
        end = min(tokens, seq_length + 1 if scored == 1 else scored + stride)
        yield shard, max(0, end - 1 - seq_length), end, scored
        scored = end


def perplexity(
    model: InferenceModel, dataset: Dataset, stride: int | None = None, words: int | None = None
) -> dict[str, Any]:
    """exp of the mean negative log-likelihood over all tokens of the shards, on every rank.

    `words`: how many words the original text had; the sum over the subwords is then also divided by
    that number, so that tokenizers can be compared (Shoeybi et al. 2019, arXiv 1909.08053,
    section 5.3 and appendix E.1). `stride` 32 is theirs; None is seq_length: no overlap, and the
    least work. Raises InputError.
    """
    stride = model.seq_length if stride is None else stride
    if not 1 <= stride <= model.seq_length:
        raise SharedInputError(f"stride = {stride}; legal: 1 to seq_length = {model.seq_length}")
    if dataset.vocab_size > model.vocab_size:
        raise SharedInputError(
            f"{dataset.directory} has a vocabulary of {dataset.vocab_size}, the model one of "
            f"{model.vocab_size}: not the same tokenizer"
        )
    total, tokens = _sums(model, dataset, stride)
    if not tokens:
        raise SharedInputError(f"{dataset.directory} has no shard of two tokens or more")
    if math.isnan(total):
        raise SharedInputError(f"{dataset.directory}: {NOT_FINITE}")
    found = {
        "dataset": str(dataset.directory),
        "tokens": tokens,
        "stride": stride,
        "nats_per_token": total / tokens,
        "perplexity": _exp(total / tokens),
    }
    if words is not None:
        found |= {"words": words, "word_perplexity": _exp(total / words)}
    return found


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def _sums(model: InferenceModel, dataset: Dataset, stride: int) -> tuple[float, int]:
    """Negative log-likelihood in nats, and how many tokens were scored, of all data ranks."""
    data = model.axes["data"]
    every = (
        window
        for shard, header in enumerate(dataset.headers)
        for window in windows(header.tokens, shard, model.seq_length, stride)
    )
    groups = _groups(every, rows_of(model.seq_length, model))
    total, tokens = 0.0, 0
    for group in islice(groups, data.rank, None, data.size):
        answer = model.log_probabilities(*_batch(dataset, group, model))
        if answer is None:
            continue
        values = answer[0].double().cpu()
        for column, (_, first, end, scored) in enumerate(group):
            total -= float(values[scored - 1 - first : end - 1 - first, column].sum())
            tokens += end - scored
    model.finish()
    sums = data.all_gather_object(model.share((total, tokens)))
    return sum(one for one, _ in sums), sum(count for _, count in sums)


def _groups(every: Iterator[Window], rows: int) -> Iterator[list[Window]]:
    while group := list(islice(every, rows)):
        yield group


def _batch(
    dataset: Dataset, group: Sequence[Window], model: InferenceModel
) -> tuple[Tensor, Tensor]:
    """Inputs and labels [s, b] of the windows."""
    width = max(end - first for _, first, end, _ in group)
    ids = np.zeros((width, len(group)), dtype=np.int64)
    for column, (shard, first, end, _) in enumerate(group):
        tokens = dataset.shard_tokens(shard)[first:end]
        if tokens.max() >= model.vocab_size:
            path = dataset.headers[shard].path
            raise InputError(
                f"shard {path}: token id {tokens.max()} is outside the model's "
                f"vocabulary of {model.vocab_size}"
            )
        ids[: end - first, column] = tokens
    placed = torch.from_numpy(ids).to(model.device)
    return placed[:-1], placed[1:]
