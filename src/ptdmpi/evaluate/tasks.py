"""Task files of JSON lines. A line has a context, and either choices with the number of the right
choice, or the right answers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ptdmpi.config import InputError
from ptdmpi.inference.lines import numbered_lines

BETWEEN_SHOTS = "\n\n"


@dataclass(frozen=True)
class TaskItem:
    """One item (question) of a task file.

    A multiple-choice item has `choices`, and choice number `answer` is right. An item without
    choices has `answers`, each of which is right. `place` is the file and the line, for error
    messages.
    """

    context: str
    choices: tuple[str, ...] = ()
    answer: int = 0
    answers: tuple[str, ...] = ()
    place: str = field(default="", compare=False)

    @property
    def right(self) -> str:
        """Return the answer that is shown if this item is a solved example."""
        if self.choices:
            return self.choices[self.answer]
        return self.answers[0]


def read(path: Path) -> list[TaskItem]:
    """Return the items in a .jsonl file. Raise InputError if a line is not an item (the message
    has the number of the line), or if some items have choices and other items have answers."""
    items = [item_of(line, place) for place, line in numbered_lines(path, "item")]
    if len({bool(item.choices) for item in items}) > 1:
        raise InputError(f"{path} mixes multiple choice with answers; legal: one kind in a file")
    return items


def values_of(line: str, place: str, key: str) -> dict[str, Any]:
    """Return the JSON object in a line, which must have a text in the field `key`. Raise an
    InputError, whose message begins with `place`, for any other line.
    """
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not a JSON line: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get(key), str):
        raise InputError(f"{place}: no JSON object with a text in the field {key!r}")
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError(f"{place}: a lone UTF-16 surrogate is not a text") from None
    return values


def item_of(line: str, place: str) -> TaskItem:
    """Return the item in a line. Raise an InputError, whose message begins with `place`, if the
    line has no item."""
    values = values_of(line, place, "context")
    if "choices" in values and "answers" in values:
        raise InputError(f"{place}: both 'choices' and 'answers'; legal: one of them")
    if "choices" in values:
        choices = _texts(values["choices"], "choices", place)
        answer = values.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, int):
            raise InputError(f"{place}: 'answer' = {answer!r}; legal: the number of a choice")
        if not 0 <= answer < len(choices):
            raise InputError(f"{place}: 'answer' = {answer}; legal: 0 to {len(choices) - 1}")
        return TaskItem(values["context"], choices, answer, place=place)
    if "answers" not in values:
        raise InputError(f"{place}: neither 'choices' (with 'answer') nor 'answers'")
    answers = _texts(values["answers"], "answers", place)
    return TaskItem(values["context"], answers=answers, place=place)


def _texts(values: Any, key: str, place: str) -> tuple[str, ...]:
    """Return the texts in a field. Raise InputError unless the field is a list of non-empty
    texts."""
    if not isinstance(values, list) or not all(isinstance(v, str) and v.strip() for v in values):
        raise InputError(f"{place}: {key!r} must be a list of texts that are not empty")
    if not values:
        raise InputError(f"{place}: {key!r} is empty")
    return tuple(values)


def with_shots(
    items: Sequence[TaskItem], examples: Sequence[TaskItem], shots: int, separator: str
) -> list[str]:
    """Return the context of each item, after the first `shots` solved examples.

    If one of these examples is the item itself, the next example takes its place.
    """
    contexts = []
    for item in items:
        shown = [example for example in examples[: shots + 1] if example != item][:shots]
        solved = (f"{shot.context}{separator}{shot.right}{BETWEEN_SHOTS}" for shot in shown)
        contexts.append("".join(solved) + item.context)
    return contexts
