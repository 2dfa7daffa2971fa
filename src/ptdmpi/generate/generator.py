"""Continuation of several prompts at a time, with a key-value cache, for any layout of the
ranks."""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ptdmpi.base.progress import progress
from ptdmpi.config import SharedInputError
from ptdmpi.generate.sampling import Sampling, choose

if TYPE_CHECKING:  # this import starts MPI, but some programs prepare prompts without MPI
    from ptdmpi.inference.model import InferenceModel

ROWS = 16  # number of prompts that are continued together


@dataclass(frozen=True)
class Prompt:
    """A text to be continued, as token ids.

    `number` selects the random numbers, so two samples of the same text need different numbers.
    `finished(new ids)` returns True to end the continuation early.
    """

    ids: Sequence[int]
    max_new_tokens: int
    number: int = 0
    finished: Callable[[list[int]], bool] | None = None


@dataclass(frozen=True)
class Continuation:
    """The token ids with which one prompt is continued, without the end-of-document token.

    `reason` says why the continuation ended: "eod", "length" or "finished". The reason is empty
    while the continuation has not ended.
    """

    ids: list[int]
    reason: str


def check(prompt: Prompt, model: "InferenceModel") -> None:
    """Raise InputError unless the model can continue a prompt by `max_new_tokens` tokens.

    The prompt must not be empty, and all its ids must be in the vocabulary. The prompt together
    with its continuation must fit into `seq_length`.
    """
    if not prompt.ids:
        raise SharedInputError("an empty prompt: give at least one token")
    if prompt.max_new_tokens < 1:
        raise SharedInputError(f"max_new_tokens = {prompt.max_new_tokens}; legal: 1 or more")
    if min(prompt.ids) < 0 or max(prompt.ids) >= model.vocab_size:
        raise SharedInputError(
            f"a prompt has id {max(prompt.ids)}: the model has a vocabulary of {model.vocab_size}; "
            "was the model trained with this tokenizer?"
        )
    room = model.seq_length - len(prompt.ids)
    if room < 1:
        raise SharedInputError(
            f"a prompt of {len(prompt.ids)} tokens: the model has seq_length = {model.seq_length}; "
            f"legal: at most {model.seq_length - 1}, which leaves room for one more"
        )
    if prompt.max_new_tokens > room:
        raise SharedInputError(
            f"a prompt of {len(prompt.ids)} tokens and {prompt.max_new_tokens} new ones: the model "
            f"has seq_length = {model.seq_length}; legal: at most {room} new tokens"
        )


def generate(
    model: "InferenceModel",
    prompts: Sequence[Prompt],
    sampling: Sampling,
    ends: Collection[int],
    *,
    rows: int = ROWS,
) -> list[Continuation]:
    """Return the continuation of each prompt, on every rank.

    Every rank calls this function with the same prompts. `ends` are the ids that end a text. The
    prompts are divided into groups of `rows` prompts, and the data ranks continue different groups.
    Raise InputError for a prompt that `check` refuses, and for logits that are not finite.
    """
    for prompt in prompts:
        check(prompt, model)
    data = model.axes["data"]
    # prompts of similar lengths form a group, because all prompts of a group are padded to the
    # length of its longest prompt
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].ids), i))
    groups = [order[start : start + rows] for start in range(0, len(order), rows)]
    done: dict[int, Continuation] = {}
    mine = groups[data.rank :: data.size]
    # a caller that passes one group of prompts per call displays its own progress, so no bar is
    # needed here
    shown = progress("generating", len(mine), "batch")
    with shown if len(mine) > 1 else nullcontext(lambda more: None) as advance:
        for group in mine:
            written = _continue([prompts[i] for i in group], model, sampling, ends)
            done.update(zip(group, written, strict=True))
            advance(1)
    model.finish()
    for part in data.all_gather_object(done):
        done |= part
    return [done[i] for i in range(len(prompts))]


def _continue(
    prompts: Sequence[Prompt],
    model: "InferenceModel",
    sampling: Sampling,
    ends: Collection[int],
) -> list[Continuation]:
    """Return the continuations of one group of prompts, on all ranks of this model replica."""
    lengths = torch.tensor([len(prompt.ids) for prompt in prompts])
    width = int(lengths.max())
    ids = torch.zeros(width, len(prompts), dtype=torch.int64)
    for column, prompt in enumerate(prompts):
        ids[: len(prompt.ids), column] = torch.tensor(list(prompt.ids))
    positions = torch.arange(width)[:, None].expand(width, len(prompts))
    last = lengths - 1
    capacity = max(len(prompt.ids) + prompt.max_new_tokens for prompt in prompts)
    cache = model.new_cache(len(prompts), capacity)
    texts = [Continuation([], "") for _ in prompts]
    while True:
        cache.at(positions.to(model.device))
        logits = model.next_logits(ids.to(model.device), cache, last.to(model.device))
        if logits is not None and model.decides:
            values = logits.cpu().numpy()
            texts = [
                _longer(text, prompt, row, sampling=sampling, ends=ends)
                for text, prompt, row in zip(texts, prompts, values, strict=True)
            ]
        new = [text.ids[-1] if text.ids else 0 for text in texts]
        going = any(not text.reason for text in texts)
        new, going = model.share((new, going))
        if not going:
            return model.share(texts)
        # a text that has ended stays in the batch: its last token is computed again, and the result
        # is ignored
        ids = torch.tensor([new])
        positions = positions[last, torch.arange(len(prompts))] + 1
        positions = positions.clamp(max=capacity - 1)[None]
        last = torch.zeros_like(lengths)


def _longer(
    text: Continuation,
    prompt: Prompt,
    logits: np.ndarray,
    *,
    sampling: Sampling,
    ends: Collection[int],
) -> Continuation:
    """Return a continuation with one more token, sampled from the logits [vocabulary]. A
    continuation that has ended is returned unchanged."""
    if text.reason:
        return text
    token = choose(logits, sampling, prompt.number, len(prompt.ids) + len(text.ids))
    if token in ends:
        return replace(text, reason="eod")
    ids = [*text.ids, token]
    if prompt.finished is not None and prompt.finished(ids):
        return Continuation(ids, "finished")
    return Continuation(ids, "length" if len(ids) == prompt.max_new_tokens else "")
