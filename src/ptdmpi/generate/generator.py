"""Continues prompts, several at a time, with a key-value cache, in any layout."""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ptdmpi.config import SharedInputError
from ptdmpi.generate.sampling import Sampling, choose
from ptdmpi.terminal.progress import progress

if TYPE_CHECKING:  # it starts MPI, and questions are also prepared where there is none
    from ptdmpi.inference.model import InferenceModel

# Prompts that are continued together.
ROWS = 16


@dataclass(frozen=True)
class Prompt:
    """`number` tells samples apart for the random draws. `finished(new ids)` may end it early."""

    ids: Sequence[int]
    max_new_tokens: int
    number: int = 0
    finished: Callable[[list[int]], bool] | None = None


@dataclass(frozen=True)
class Continuation:
    """The new ids, without the end of document. `reason`: "eod", "length" or "finished"."""

    ids: list[int]
    reason: str


def check(prompt: Prompt, model: "InferenceModel") -> None:
    """Raises InputError for a prompt that is empty or not of the vocabulary, or that does not fit
    the model with what is to come."""
    if not prompt.ids:
        raise SharedInputError("an empty prompt: give at least one token")
    if prompt.max_new_tokens < 1:
        raise SharedInputError(f"max_new_tokens = {prompt.max_new_tokens}; legal: 1 or more")
    if min(prompt.ids) < 0 or max(prompt.ids) >= model.vocab_size:
        raise SharedInputError(
            f"a prompt has id {max(prompt.ids)}: the model has a vocabulary of {model.vocab_size}; "
            "was it trained with this tokenizer?"
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
    rows: int = ROWS,
) -> list[Continuation]:
    """The continuation of each prompt, on every rank; every rank calls it with the same prompts.

    `ends`: the ids that end a text. Groups of `rows` prompts are dealt to the data ranks. Raises
    InputError.
    """
    for prompt in prompts:
        check(prompt, model)
    data = model.axes["data"]
    # of like lengths together: a group runs until its last one ends
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].ids), i))
    groups = [order[start : start + rows] for start in range(0, len(order), rows)]
    done: dict[int, Continuation] = {}
    mine = groups[data.rank :: data.size]
    # whoever asks for a group at a time has a progress of its own
    shown = progress("generating", len(mine), "batch")
    with shown if len(mine) > 1 else nullcontext(lambda more: None) as advance:
        for group in mine:
            found = _continue([prompts[i] for i in group], model, sampling, ends)
            done.update(zip(group, found, strict=True))
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
    lengths = torch.tensor([len(prompt.ids) for prompt in prompts])
    width = int(lengths.max())
    ids = torch.zeros(width, len(prompts), dtype=torch.int64)
    for column, prompt in enumerate(prompts):
        ids[: len(prompt.ids), column] = torch.tensor(list(prompt.ids))
    positions = torch.arange(width)[:, None].expand(width, len(prompts))
    last = lengths - 1
    capacity = max(len(prompt.ids) + prompt.max_new_tokens for prompt in prompts)
    cache = model.new_cache(len(prompts), capacity)
    found = [Continuation([], "") for _ in prompts]
    while True:
        cache.at(positions.to(model.device))
        logits = model.next_logits(ids.to(model.device), cache, last.to(model.device))
        if logits is not None and model.decides:
            values = logits.cpu().numpy()
            found = [
                one if one.reason else _longer(one, prompt, row, sampling, ends)
                for one, prompt, row in zip(found, prompts, values, strict=True)
            ]
        new, going = model.share(
            ([one.ids[-1] if one.ids else 0 for one in found], any(not one.reason for one in found))
        )
        if not going:
            return model.share(found)
        # a text that has ended is continued idly at its last place
        ids = torch.tensor([new])
        positions = positions[last, torch.arange(len(prompts))] + 1
        positions = positions.clamp(max=capacity - 1)[None]
        last = torch.zeros_like(lengths)


def _longer(
    one: Continuation,
    prompt: Prompt,
    logits: np.ndarray,
    sampling: Sampling,
    ends: Collection[int],
) -> Continuation:
    """A continuation with one more token."""
    token = choose(logits, sampling, prompt.number, len(prompt.ids) + len(one.ids))
    if token in ends:
        return replace(one, reason="eod")
    longer = [*one.ids, token]
    if prompt.finished is not None and prompt.finished(longer):
        return Continuation(longer, "finished")
    return Continuation(longer, "length" if len(longer) == prompt.max_new_tokens else "")
