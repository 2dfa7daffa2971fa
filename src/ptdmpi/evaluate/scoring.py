"""Log-likelihoods of given tokens, computed in any parallel layout."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ptdmpi.base.progress import progress
from ptdmpi.config import SharedInputError
from ptdmpi.generate.sampling import NOT_FINITE

if TYPE_CHECKING:  # this import starts MPI, but questions are also prepared without MPI
    from ptdmpi.inference.model import InferenceModel

# Limits for a batch: the maximum number of its tokens, which is enough for efficient matrix
# products, and the maximum size of its logits in bytes.
BATCH_TOKENS = 4096
LOGITS_BYTES = 1 << 28


@dataclass(frozen=True)
class Request:
    """A request for the probability of the tokens ids[first:]. Each of these tokens is predicted
    from all tokens before it.

    `first` is at least 1. `place` is the beginning of error messages, for example a file and a
    line.
    """

    ids: Sequence[int]
    first: int
    place: str = ""


@dataclass(frozen=True)
class Score:
    """The score of one request.

    `log_likelihood` is the sum over the `tokens` scored tokens, in nats. `greedy` is True if each
    token is the most probable token at its position.
    """

    log_likelihood: float
    tokens: int
    greedy: bool


def score(model: "InferenceModel", requests: Sequence[Request]) -> list[Score]:
    """Return the score of each request, on every rank. All ranks call this function with the same
    requests.

    A request that is longer than `seq_length` is cut at its beginning. Raise InputError if scored
    tokens would be cut off, if an id is outside the vocabulary, or if a score is NaN, which cannot
    be compared.
    """
    inside = [fitted(request, model.seq_length, model.vocab_size) for request in requests]
    order = sorted(range(len(inside)), key=lambda i: (-len(inside[i].ids), i))
    groups = list(_groups([len(inside[i].ids) - 1 for i in order], model))
    data = model.axes["data"]
    mine = [[order[i] for i in group] for group in groups[data.rank :: data.size]]
    scores: dict[int, Score] = {}
    with progress("scoring", len(mine), "batch") as advance:
        for group in mine:
            answer = model.log_probabilities(*_batch([inside[i] for i in group], model.device))
            advance(1)
            if answer is None:
                continue
            values, greedy = (part.cpu().numpy() for part in answer)
            for column, i in enumerate(group):
                place = slice(inside[i].first - 1, len(inside[i].ids) - 1)
                total = float(values[place, column].sum(dtype=np.float64))
                tokens = place.stop - place.start
                scores[i] = Score(total, tokens, bool(greedy[place, column].all()))
    model.finish()
    for part in data.all_gather_object(model.share(scores)):
        scores |= part
    if any(math.isnan(answer.log_likelihood) for answer in scores.values()):
        raise SharedInputError(NOT_FINITE)
    return [scores[i] for i in range(len(requests))]


def fitted(request: Request, seq_length: int, vocab_size: int) -> Request:
    """If the request is longer than `seq_length`, remove its first tokens. Return the request.

    Raise InputError if the removed tokens include scored tokens, or if an id is outside the
    vocabulary.
    """
    ids = request.ids
    first = request.first
    place = f"{request.place}: " if request.place else ""
    if not 1 <= first < len(ids):
        raise SharedInputError(
            f"{place}nothing to score: {len(ids)} tokens, the first {first} of them given"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise SharedInputError(
            f"{place}id {max(ids)} is outside the model's vocabulary of {vocab_size}; was the "
            "model trained with this tokenizer?"
        )
    cut = max(0, len(ids) - 1 - seq_length)
    if cut >= first:
        raise SharedInputError(
            f"{place}{len(ids) - first} tokens to score: the model has seq_length = {seq_length}"
        )
    return Request(ids[cut:], first - cut)


def _groups(lengths: Sequence[int], model: "InferenceModel") -> Iterator[list[int]]:
    """Yield lists of request numbers; the requests of a list form one batch. `lengths` are the
    numbers of tokens of the requests, in descending order."""
    start = 0
    while start < len(lengths):
        rows = rows_of(lengths[start], model)
        yield list(range(start, min(len(lengths), start + rows)))
        start += rows


def rows_of(length: int, model: "InferenceModel") -> int:
    """Return how many sequences of `length` tokens form a batch."""
    logits_bytes = 4 * length * math.ceil(model.vocab_size / model.axis.size)
    return max(1, min(BATCH_TOKENS // length, LOGITS_BYTES // logits_bytes))


def _batch(requests: Sequence[Request], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and labels, each a tensor [tokens, requests]. Shorter sequences are padded at
    their end, which does not change the scores."""
    width = max(len(request.ids) for request in requests)
    ids = torch.zeros(width, len(requests), dtype=torch.int64)
    for column, request in enumerate(requests):
        ids[: len(request.ids), column] = torch.tensor(list(request.ids))
    ids = ids.to(device)
    return ids[:-1], ids[1:]
