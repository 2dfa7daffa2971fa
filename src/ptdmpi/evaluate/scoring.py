"""Log-likelihoods of given tokens, in any layout."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ptdmpi.config import SharedInputError
from ptdmpi.generate.sampling import NOT_FINITE
from ptdmpi.terminal.progress import progress

if TYPE_CHECKING:  # it starts MPI, and questions are also prepared where there is none
    from ptdmpi.inference.model import InferenceModel

# A batch is as large as both allow: enough tokens for efficient products, and not more logits.
BATCH_TOKENS = 4096
LOGITS_BYTES = 1 << 28


@dataclass(frozen=True)
class Request:
    """How probable are ids[first:], each token given all that are before it? `first` >= 1.
    `place`: what stands in front of messages."""

    ids: Sequence[int]
    first: int
    place: str = ""


@dataclass(frozen=True)
class Score:
    """`log_likelihood`: the sum, in nats; `greedy`: each token is the most probable one."""

    log_likelihood: float
    tokens: int
    greedy: bool


def score(model: "InferenceModel", requests: Sequence[Request]) -> list[Score]:
    """The score of each request, on every rank; every rank calls it with the same requests.

    What does not fit `seq_length` loses its first tokens. Raises InputError where that would cut
    into the scored ones, an id is none of the vocabulary, or a score is no number: then no answer
    is better than another.
    """
    inside = [fitted(one, model.seq_length, model.vocab_size) for one in requests]
    order = sorted(range(len(inside)), key=lambda i: (-len(inside[i].ids), i))
    groups = list(_groups([len(inside[i].ids) - 1 for i in order], model))
    data = model.axes["data"]
    mine = [[order[i] for i in group] for group in groups[data.rank :: data.size]]
    found: dict[int, Score] = {}
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
                found[i] = Score(total, tokens, bool(greedy[place, column].all()))
    model.finish()
    found = model.share(found)
    everything = {i: one for part in data.all_gather_object(found) for i, one in part.items()}
    if any(math.isnan(one.log_likelihood) for one in everything.values()):
        raise SharedInputError(NOT_FINITE)
    return [everything[i] for i in range(len(requests))]


def fitted(request: Request, seq_length: int, vocab_size: int) -> Request:
    """The request without the first tokens that a sequence has no place for. Raises InputError
    where that would cut into the scored ones, or an id is none of the vocabulary."""
    ids, first, place = request.ids, request.first, f"{request.place}: " if request.place else ""
    if not 1 <= first < len(ids):
        raise SharedInputError(
            f"{place}nothing to score: {len(ids)} tokens, the first {first} of them given"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise SharedInputError(
            f"{place}id {max(ids)} is outside the model's vocabulary of {vocab_size}; was it "
            "trained with this tokenizer?"
        )
    cut = max(0, len(ids) - 1 - seq_length)
    if cut >= first:
        raise SharedInputError(
            f"{place}{len(ids) - first} tokens to score: the model has seq_length = {seq_length}"
        )
    return Request(ids[cut:], first - cut)


def _groups(lengths: Sequence[int], model: "InferenceModel") -> Iterator[list[int]]:
    """Numbers of requests of falling lengths that are scored together."""
    start = 0
    while start < len(lengths):
        rows = rows_of(lengths[start], model)
        yield list(range(start, min(len(lengths), start + rows)))
        start += rows


def rows_of(length: int, model: "InferenceModel") -> int:
    """How many sequences of so many tokens make a batch."""
    logits_bytes = 4 * length * math.ceil(model.vocab_size / model.axis.size)
    return max(1, min(BATCH_TOKENS // length, LOGITS_BYTES // logits_bytes))


def _batch(requests: Sequence[Request], device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and labels [s, b]; what is behind a shorter sequence does not matter."""
    width = max(len(request.ids) for request in requests)
    ids = torch.zeros(width, len(requests), dtype=torch.int64)
    for column, request in enumerate(requests):
        ids[: len(request.ids), column] = torch.tensor(list(request.ids))
    ids = ids.to(device)
    return ids[:-1], ids[1:]
