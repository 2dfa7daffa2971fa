"""Generated answers against known ones: exact match, with majority votes over samples."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ptdmpi.config import InputError
from ptdmpi.evaluate.choice import standard_error
from ptdmpi.evaluate.tasks import TaskItem
from ptdmpi.generate.text import Text

NUMBER = re.compile(r"[-+]?(\d[\d,]*(\.\d+)?|\.\d+)\.?")
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(answer: str) -> str:
    """Without case, articles, punctuation and repeated spaces, as TriviaQA's own script and LLaMA
    (arXiv 2302.13971, appendix A) compare answers. One that is all of these is only stripped; a
    number keeps its sign and point: -1.5 is not 15."""
    if NUMBER.fullmatch(answer.strip()):
        return answer.strip().rstrip(".").lstrip("+").replace(",", "")
    plain = ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION))
    return " ".join(plain.split()) or " ".join(answer.lower().split())


def compiled(pattern: str | None) -> re.Pattern[str] | None:
    """Raises InputError for what is no regular expression."""
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise InputError(f"--extract {pattern}: {error}") from None


def extract(generated: str, until: Sequence[str], pattern: re.Pattern[str] | None) -> str:
    """The answer in what was generated: up to the first of `until`, and of that what `pattern`
    finds last (its first group, where it has one); nothing where it finds none."""
    text = cut(generated, until)
    if pattern is None:
        return text
    found = list(pattern.finditer(text))
    return (found[-1][1 if pattern.groups else 0] or "") if found else ""


def cut(text: str, until: Sequence[str]) -> str:
    """The text up to the first of `until`."""
    ends = [text.find(one) for one in until]
    return text[: min([end for end in ends if end >= 0], default=len(text))]


class Stop:
    """Whether some new ids hold, as text, one of `until`; spaces before the answer do not count."""

    def __init__(self, text: Text, until: Sequence[str]) -> None:
        self.text, self.until = text, until

    def __call__(self, ids: list[int]) -> bool:
        written = self.text.decode(ids)
        return any(one in written for one in self.until)


def majority(answers: Sequence[str]) -> str:
    """The most frequent of some normalised answers, empty ones aside; of equally frequent ones the
    first."""
    given = [answer for answer in answers if answer]
    return Counter(given).most_common(1)[0][0] if given else ""


def matches(items: Sequence[TaskItem], answers: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Shares of items that were answered right, by the majority of the samples of each
    (`exact_match`; Wang et al. 2022, arXiv 2203.11171) and by a single one (`exact_match_single`,
    the mean)."""
    voted, single, samples = 0, 0, len(answers[0])
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
