"""Questions of a task file. The questions are prepared once, without a model. Afterwards a model
can answer the prepared questions repeatedly."""

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
from ptdmpi.inference.text import Text

if TYPE_CHECKING:  # this import starts MPI, but questions are also prepared without MPI
    from ptdmpi.inference.model import InferenceModel


@dataclass(frozen=True)
class Asking:
    """The options for the prompts that are made from the items of a task file, and for the answers.

    `separator` is put between a context and its answer. The probability of a choice is also
    computed after the context `neutral`, for comparison. For each item, `samples` answers are
    generated with `sampling`. An answer ends after `max_new_tokens` tokens or before one of the
    strings `until`. The pattern `extract` finds the part of an answer that is compared with the
    right answers.
    """

    separator: str = " "
    neutral: str = "Answer:"
    samples: int = 1
    sampling: Sampling = GREEDY
    max_new_tokens: int = 64
    until: tuple[str, ...] = ("\n",)
    extract: str | None = None


@dataclass(frozen=True)
class Questions(ABC):
    """The items of one file. The object can be pickled, so that one rank can prepare it for all
    ranks.

    `truncated` is the number of texts that are cut at their beginning because they are too long. A
    text is either a prompt or a context with one of its choices. A prompt is too long if it leaves
    no room for an answer in the sequence.
    """

    items: tuple[TaskItem, ...]
    asking: Asking
    truncated: int

    @abstractmethod
    def ask(self, model: "InferenceModel", text: Text, numbers: range) -> list[Any]:
        """Return the answers of the model to the items `numbers`, in this order, as the method
        `result` needs them.

        Every rank calls this method and gets the answers. Raise InputError if the model's scores
        are NaN.
        """

    @abstractmethod
    def result(self, given: Sequence[Any]) -> dict[str, Any]:
        """Return the scores for the file. `given` has the answers that `ask` has returned for all
        items."""


@dataclass(frozen=True)
class Choices(Questions):
    """Multiple-choice items, with two requests for each choice of an item."""

    wanted: tuple[tuple[Request, ...], ...]

    def ask(self, model: "InferenceModel", text: Text, numbers: range) -> list[Any]:
        """Return, for each of the items `numbers`, the scores of its requests."""
        parts = [self.wanted[number] for number in numbers]
        scores = iter(score(model, [request for part in parts for request in part]))
        return [[next(scores) for _ in part] for part in parts]

    def result(self, given: Sequence[Any]) -> dict[str, Any]:
        """Return the accuracy by each measure of `choice.accuracies`."""
        scores = [answer for part in given for answer in part]
        return {
            "kind": "choice",
            "truncated": self.truncated,
            **accuracies(self.items, scores),
        }


@dataclass(frozen=True)
class Answers(Questions):
    """Items for which the model generates answers, with one prompt (token ids) for each item."""

    prompts: tuple[tuple[int, ...], ...]

    def ask(self, model: "InferenceModel", text: Text, numbers: range) -> list[Any]:
        """Return `asking.samples` generated answers for each item."""
        asking = self.asking
        samples = asking.samples
        stop = Stop(text, asking.until)
        prompts = [
            Prompt(self.prompts[number], asking.max_new_tokens, number * samples + k, stop)
            for number in numbers
            for k in range(samples)
        ]
        continuations = generate(model, prompts, asking.sampling, text.ends)
        pattern = compiled(asking.extract)
        given = [
            extract(text.behind(prompt.ids, new.ids), asking.until, pattern)
            for prompt, new in zip(prompts, continuations, strict=True)
        ]
        return [given[start : start + samples] for start in range(0, len(given), samples)]

    def result(self, given: Sequence[Any]) -> dict[str, Any]:
        """Return the fraction of items whose generated answers match exactly, and further scores
        (`answers.matches`)."""
        return {"kind": "answers", "truncated": self.truncated, **matches(self.items, given)}


@dataclass(frozen=True)
class Limits:
    """A model's sequence length and vocabulary size. All questions for the model must fit within
    these limits."""

    seq_length: int
    vocab_size: int


def questions(
    text: Text,
    items: Sequence[TaskItem],
    contexts: Sequence[str],
    *,
    asking: Asking,
    limits: Limits,
) -> Questions:
    """Return the questions for some items. Each item is converted to token ids, together with its
    context.

    Raise InputError for items that do not fit a model with these `limits`.
    """
    if items[0].choices:
        return _choices(text, items, contexts, asking=asking, limits=limits)
    room = limits.seq_length - asking.max_new_tokens
    if room < 1:
        most = limits.seq_length - 1
        raise InputError(f"--max-new-tokens {asking.max_new_tokens}; legal: 1 to {most}")
    ends = asking.separator.rstrip(" ")
    encoded = [text.prompt(context + ends) for context in contexts]
    for item, ids in zip(items, encoded, strict=True):
        if max(ids) >= limits.vocab_size:
            raise InputError(
                f"{item.place}: id {max(ids)} is outside the model's vocabulary of "
                f"{limits.vocab_size}; was the model trained with this tokenizer?"
            )
    truncated = sum(len(ids) > room for ids in encoded)
    prompts = tuple(tuple(ids[-room:]) for ids in encoded)
    return Answers(tuple(items), asking, truncated, prompts)


def _choices(
    text: Text,
    items: Sequence[TaskItem],
    contexts: Sequence[str],
    *,
    asking: Asking,
    limits: Limits,
) -> Choices:
    """Return multiple-choice items as requests. Raise InputError for a request that does not
    fit."""
    wanted = requests(text, items, contexts, separator=asking.separator, neutral=asking.neutral)
    for request in wanted:
        fitted(request, limits.seq_length, limits.vocab_size)
    truncated = sum(len(request.ids) - 1 > limits.seq_length for request in wanted)
    rest = iter(wanted)
    parts = tuple(tuple(next(rest) for _ in range(2 * len(item.choices))) for item in items)
    return Choices(tuple(items), asking, truncated, parts)


def read(path: Path, text: Text, asking: Asking, limits: Limits) -> Questions:
    """Return the questions in a file, without solved examples before them. Raise InputError if the
    file cannot be used, or if an item does not fit the model."""
    items = tasks.read(path)
    contexts = [item.context for item in items]
    return questions(text, items, contexts, asking=asking, limits=limits)
