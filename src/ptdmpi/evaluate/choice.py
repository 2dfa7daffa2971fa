"""Accuracy in multiple choice, where the model chooses by log-likelihood, as in LLaMA's tables."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ptdmpi.evaluate.scoring import Request, Score
from ptdmpi.evaluate.tasks import TaskItem
from ptdmpi.inference.text import Text


def continuation(text: Text, context: str, rest: str, place: str = "") -> Request:
    """Return a request that asks the model for the probability of the text `rest` after the text
    `context`.

    The context and the continuation are tokenized together, because a token may span the end of the
    context. Spaces between the context and the continuation become part of the continuation,
    because tokenizers join a space with the word after it. If `rest` is not empty, at least one
    token is scored. `place` is the beginning of error messages: the file and the line of the item.
    """
    end = len(context.rstrip(" "))
    rest = context[end:] + rest
    context = context[:end]
    before = text.prompt(context)
    ids = [*text.prefix, *text.encode(context + rest)]
    if not context and not text.prefix:
        ids = [*before, *ids]
    return Request(ids, max(1, min(len(before), len(ids) - 1)), place)


def requests(
    text: Text,
    items: Sequence[TaskItem],
    contexts: Sequence[str],
    *,
    separator: str,
    neutral: str,
) -> list[Request]:
    """Return two requests for each choice of each item: one for the choice after the context of the
    item, and one for the choice after the text `neutral`."""
    return [
        continuation(text, before, separator + choice, item.place)
        for item, context in zip(items, contexts, strict=True)
        for choice in item.choices
        for before in (context, neutral)
    ]


class ChoiceScores(NamedTuple):
    """The two scores of one choice: `here` is the score after the context of the item, and
    `neutral` is the score after the neutral context."""

    choice: str
    here: Score
    neutral: Score


MEASURES: dict[str, Callable[[ChoiceScores], float]] = {
    "accuracy": lambda scores: scores.here.log_likelihood,
    "accuracy_per_character": lambda scores: scores.here.log_likelihood / len(scores.choice),
    "accuracy_per_token": lambda scores: scores.here.log_likelihood / scores.here.tokens,
    "accuracy_against_neutral": (
        lambda scores: scores.here.log_likelihood - scores.neutral.log_likelihood
    ),
}


def accuracies(items: Sequence[TaskItem], scores: Sequence[Score]) -> dict[str, Any]:
    """Return the accuracy by each measure: the fraction of items whose right choice has the
    greatest value of the measure.

    `scores` has the score of each request that `requests` returns for the items, in the same order.
    There are four measures. The first three are the log-likelihood itself, the log-likelihood per
    character (LLaMA, arXiv 2302.13971, section 3, following Gao et al. 2021), and the
    log-likelihood per token. The fourth measure is the difference between the log-likelihoods after
    the item's context and after the neutral context. LLaMA uses this difference for OpenBookQA and
    BoolQ, following Brown et al. 2020. If several choices have the greatest value of a measure, the
    first of these choices counts as the model's choice.
    """
    right = dict.fromkeys(MEASURES, 0)
    rest = iter(scores)
    for item in items:
        choices = [ChoiceScores(choice, next(rest), next(rest)) for choice in item.choices]
        for name, measure in MEASURES.items():
            values = [measure(choice) for choice in choices]
            right[name] += values.index(max(values)) == item.answer
    count = len(items)
    return {
        "items": count,
        **{name: number / count for name, number in right.items()},
        "standard_error": standard_error(right["accuracy"] / count, count),
    }


def standard_error(share: float, count: int) -> float:
    """Return the standard error of a fraction `share` of `count` independent items."""
    return math.sqrt(share * (1.0 - share) / count)
