"""Scores for generated answers: exact match, and majority votes over several samples."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ptdmpi.config import InputError
from ptdmpi.evaluate.choice import standard_error
from ptdmpi.evaluate.tasks import TaskItem
from ptdmpi.inference.text import Text

NUMBER = re.compile(r"[-+]?(\d[\d,]*(\.\d+)?|\.\d+)\.?")
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(answer: str) -> str:
    """Return an answer in lower case, without articles, punctuation and repeated spaces.

    TriviaQA's script and LLaMA (arXiv 2302.13971, appendix A) compare answers in this form. An
    answer that is a number keeps its minus sign and its decimal point, since -1.5 is not 15. If
    nothing would remain of an answer, only the case and the spaces are changed.
    """
    if NUMBER.fullmatch(answer.strip()):
        return answer.strip().rstrip(".").lstrip("+").replace(",", "")
    plain = ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION))
    return " ".join(plain.split()) or " ".join(answer.lower().split())


def compiled(pattern: str | None) -> re.Pattern[str] | None:
    """Return the compiled regular expression `pattern`, or None if `pattern` is None. Raise
    InputError if `pattern` is not a regular expression."""
    if pattern is None:
        return None
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InputError(f"--extract {pattern}: {error}") from None


def extract(generated: str, until: Sequence[str], pattern: re.Pattern[str] | None) -> str:
    """Return the answer in a generated text.

    The answer is the text before the first occurrence of a string in `until`. If a pattern is
    given, the answer is the last match of the pattern in that text, or "" if there is no match. If
    the pattern has groups, the answer is the first group of this match.
    """
    text = cut(generated, until)
    if pattern is None:
        return text
    matched = list(pattern.finditer(text))
    if not matched:
        return ""
    group = 1 if pattern.groups else 0
    return matched[-1][group] or ""


def cut(text: str, until: Sequence[str]) -> str:
    """Return the text before the first occurrence of a string in `until`."""
    ends = [text.find(end) for end in until]
    return text[: min([end for end in ends if end >= 0], default=len(text))]


class Stop:
    """A callable object that decides when generation stops: when the text of the generated token
    ids contains one of the strings `until`."""

    def __init__(self, text: Text, until: Sequence[str]) -> None:
        self.text = text
        self.until = until

    def __call__(self, ids: list[int]) -> bool:
        """Return True if generation should stop after `ids`."""
        written = self.text.decode(ids)
        return any(end in written for end in self.until)


def majority(answers: Sequence[str]) -> str:
    """Return the most frequent non-empty answer. If several answers are equally frequent, return
    the first of them.

    `answers` are in the form that `normalise` returns. Return "" if all answers are empty.
    """
    given = [answer for answer in answers if answer]
    if not given:
        return ""
    return Counter(given).most_common(1)[0][0]


def matches(items: Sequence[TaskItem], answers: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the fraction of items that were answered correctly, and further scores.

    `answers` has the sampled answers to each item. `exact_match` is the fraction of items for which
    the majority vote of the sampled answers is right (self-consistency; Wang et al. 2022,
    arXiv 2203.11171). `exact_match_single` is the fraction of all sampled answers that are right.
    """
    voted = 0
    single = 0
    samples = len(answers[0])
    for item, given in zip(items, answers, strict=True):
        right = {normalise(answer) for answer in item.answers}
        normal = [normalise(answer) for answer in given]
        voted += majority(normal) in right
        single += sum(answer in right for answer in normal)
    count = len(items)
    return {
        "items": count,
        "samples": samples,
        "exact_match": voted / count,
        "exact_match_single": single / (count * samples),
        "standard_error": standard_error(voted / count, count),
    }
