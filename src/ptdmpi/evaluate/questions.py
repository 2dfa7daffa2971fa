"""A task file as what a model is asked: prepared once, without a model, and asked as often as one
likes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptdmpi.config import InputError
from ptdmpi.evaluate import tasks
from ptdmpi.evaluate.answers import Stop, compiled, extract, matches
from ptdmpi.evaluate.choice import accuracies, requests
from ptdmpi.evaluate.scoring import Request, fitted, score
from ptdmpi.evaluate.tasks import TaskItem
from ptdmpi.generate.generator import Prompt, generate
from ptdmpi.generate.sampling import GREEDY, Sampling
from ptdmpi.generate.text import Text

if TYPE_CHECKING:  # it starts MPI, and questions are also prepared where there is none
    from ptdmpi.inference.model import InferenceModel


@dataclass(frozen=True)
class Asking:
    """How items are asked: what stands between a context and its answer, which context choices are
    compared with, and of answers how they are generated and which part of them counts."""

    separator: str = " "
    neutral: str = "Answer:"
    samples: int = 1
    sampling: Sampling = GREEDY
    max_new_tokens: int = 64
    until: tuple[str, ...] = ("\n",)
    extract: str | None = None


@dataclass(frozen=True)
class Questions(ABC):
    """The items of one file. Pickles, so that one rank prepares them for all.

    `truncated`: of how many the beginning is cut, for they are longer than a sequence.
    """

    items: tuple[TaskItem, ...]
    asking: Asking
    truncated: int

    @abstractmethod
    def ask(self, model: "InferenceModel", text: Text, of: range) -> list[Any]:
        """What `result` needs to know of some items, in their order; every rank calls it and is
        told. Raises InputError where the model gives no numbers."""

    @abstractmethod
    def result(self, given: Sequence[Any]) -> dict[str, Any]:
        """The file's scores, of what `ask` has returned for all items."""


@dataclass(frozen=True)
class Choices(Questions):
    """Multiple choice: two requests for each choice of an item."""

    wanted: tuple[tuple[Request, ...], ...]

    def ask(self, model: "InferenceModel", text: Text, of: range) -> list[Any]:
        parts = [self.wanted[number] for number in of]
        scores = iter(score(model, [one for part in parts for one in part]))
        return [[next(scores) for _ in part] for part in parts]

    def result(self, given: Sequence[Any]) -> dict[str, Any]:
        scores = [one for part in given for one in part]
        return {
            "kind": "choice",
            "truncated": self.truncated,
            **accuracies(self.items, scores),
        }


@dataclass(frozen=True)
class Answers(Questions):
    """Generated answers: the ids of one prompt for each item."""

    prompts: tuple[tuple[int, ...], ...]

    def ask(self, model: "InferenceModel", text: Text, of: range) -> list[Any]:
        asking, samples = self.asking, self.asking.samples
        stop = Stop(text, asking.until)
        prompts = [
            Prompt(self.prompts[number], asking.max_new_tokens, number * samples + k, stop)
            for number in of
            for k in range(samples)
        ]
        found = generate(model, prompts, asking.sampling, text.ends)
        pattern = compiled(asking.extract)
        given = [
            extract(text.behind(prompt.ids, one.ids), asking.until, pattern)
            for prompt, one in zip(prompts, found, strict=True)
        ]
        return [given[start : start + samples] for start in range(0, len(given), samples)]

    def result(self, given: Sequence[Any]) -> dict[str, Any]:
        return {"kind": "answers", "truncated": self.truncated, **matches(self.items, given)}


def questions(
    text: Text, items: Sequence[TaskItem], contexts: Sequence[str], asking: Asking, limits: "Limits"
) -> Questions:
    """The items behind their contexts, as ids. Raises InputError for what the model cannot be
    asked."""
    if items[0].choices:
        wanted = requests(text, items, contexts, asking.separator, asking.neutral)
        for one in wanted:
            fitted(one, limits.seq_length, limits.vocab_size)
        cut_short = sum(len(one.ids) - 1 > limits.seq_length for one in wanted)
        rest = iter(wanted)
        parts = tuple(tuple(next(rest) for _ in range(2 * len(item.choices))) for item in items)
        return Choices(tuple(items), asking, cut_short, parts)
    room = limits.seq_length - asking.max_new_tokens
    if room < 1:
        most = limits.seq_length - 1
        raise InputError(f"--max-new-tokens {asking.max_new_tokens}; legal: 1 to {most}")
    ends = asking.separator.rstrip(" ")
    encoded = [text.prompt(one + ends) for one in contexts]
    for item, ids in zip(items, encoded, strict=True):
        if max(ids) >= limits.vocab_size:
            raise InputError(
                f"{item.place}: id {max(ids)} is outside the model's vocabulary of "
                f"{limits.vocab_size}; was it trained with this tokenizer?"
            )
    cut_short = sum(len(ids) > room for ids in encoded)
    prompts = tuple(tuple(ids[-room:]) for ids in encoded)
    return Answers(tuple(items), asking, cut_short, prompts)


@dataclass(frozen=True)
class Limits:
    """What of a model decides whether it can be asked something."""

    seq_length: int
    vocab_size: int


def read(path: Path, text: Text, asking: Asking, limits: Limits) -> Questions:
    """The questions of a file, without solved examples before them. Raises InputError."""
    items = tasks.read(path)
    return questions(text, items, [item.context for item in items], asking, limits)
