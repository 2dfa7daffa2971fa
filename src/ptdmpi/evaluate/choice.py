"""Multiple choice by log-likelihood, as in LLaMA's tables."""

import math
from collections.abc import Sequence
from typing import Any

from ptdmpi.evaluate.scoring import Request, Score
from ptdmpi.evaluate.tasks import TaskItem
from ptdmpi.generate.text import Text


def continuation(text: Text, context: str, rest: str, place: str = "") -> Request:
    """How probable is `rest` behind `context`? Tokenised together, for a token may span the end of
    the context; spaces there belong to the rest, as tokenizers put them before words. Every text
    that is not empty has at least one token to score. `place` stands in messages."""
    end = len(context.rstrip(" "))
    context, rest = context[:end], context[end:] + rest
    before = text.prompt(context)
    ids = [*text.prefix, *text.encode(context + rest)]
    if not context and not text.prefix:
        ids = [*before, *ids]
    return Request(ids, max(1, min(len(before), len(ids) - 1)), place)


def requests(
    text: Text, items: Sequence[TaskItem], contexts: Sequence[str], separator: str, neutral: str
) -> list[Request]:
    """For each choice of each item two: behind its context, and behind the `neutral` one."""
    found = []
    for item, context in zip(items, contexts, strict=True):
        for choice in item.choices:
            for before in (context, neutral):
                found.append(continuation(text, before, separator + choice, item.place))
    return found


def accuracies(items: Sequence[TaskItem], scores: Sequence[Score]) -> dict[str, Any]:
    """Shares of items whose right choice is the most probable one: by the plain log-likelihood, per
    character (LLaMA, arXiv 2302.13971, section 3, after Gao et al. 2021), per token, and against
    the neutral context (there for OpenBookQA and BoolQ, after Brown et al. 2020).

    Of equally probable choices the first counts as chosen.
    """
    right = dict.fromkeys(("plain", "per_character", "per_token", "against_neutral"), 0)
    scores, place = list(scores), 0
    for item in items:
        pairs = [scores[place + 2 * k : place + 2 * k + 2] for k in range(len(item.choices))]
        place += 2 * len(item.choices)
        values = {
            "plain": [here.log_likelihood for here, _ in pairs],
            "per_character": [
                here.log_likelihood / len(choice)
                for (here, _), choice in zip(pairs, item.choices, strict=True)
            ],
            "per_token": [here.log_likelihood / here.tokens for here, _ in pairs],
            "against_neutral": [
                here.log_likelihood - there.log_likelihood for here, there in pairs
            ],
        }
        for key, of_choices in values.items():
            right[key] += of_choices.index(max(of_choices)) == item.answer
    count = len(items)
    return {
        "items": count,
        **{
            f"accuracy{'' if key == 'plain' else '_' + key}": number / count
            for key, number in right.items()
        },
        "standard_error": standard_error(right["plain"] / count, count),
    }


def standard_error(share: float, count: int) -> float:
    return math.sqrt(share * (1.0 - share) / count)
