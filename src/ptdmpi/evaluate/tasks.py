"""Tasks from JSON lines: a context, and either choices with the number of the right one, or the
answers that count."""

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
    """One question. Multiple choice: `choices`, of which number `answer` is right; else any of
    `answers` is. `place`: file and line, for messages."""

    context: str
    choices: tuple[str, ...] = ()
    answer: int = 0
    answers: tuple[str, ...] = ()
    place: str = field(default="", compare=False)

    @property
    def right(self) -> str:
        """What an example shows as the answer."""
        return self.choices[self.answer] if self.choices else self.answers[0]


def read(path: Path) -> list[TaskItem]:
    """The items of a .jsonl file, all of one kind. Raises InputError with the line."""
    items = [item_of(line, place) for place, line in numbered_lines(path, "item")]
    if len({bool(item.choices) for item in items}) > 1:
        raise InputError(f"{path} mixes multiple choice with answers; legal: one kind in a file")
    return items


def values_of(line: str, place: str, key: str) -> dict[str, Any]:
    """The JSON object of a line that has a text in the field `key`. Raises InputError."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not a JSON line: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get(key), str):
        raise InputError(f"{place}: no JSON object with a text in the field {key!r}")
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError(f"{place}: half of a UTF-16 pair is no text") from None
    return values


def item_of(line: str, place: str) -> TaskItem:
    """The item of a line. Raises InputError."""
    values = values_of(line, place, "context")
    if "choices" in values and "answers" in values:
        raise InputError(f"{place}: both 'choices' and 'answers'; legal: one of them")
    if "choices" in values:
        choices, answer = _texts(values["choices"], "choices", place), values.get("answer")
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
    if not isinstance(values, list) or not all(isinstance(v, str) and v.strip() for v in values):
        raise InputError(f"{place}: {key!r} must be a list of texts that are not empty")
    if not values:
        raise InputError(f"{place}: {key!r} is empty")
    return tuple(values)


def with_shots(
    items: Sequence[TaskItem], examples: Sequence[TaskItem], shots: int, separator: str
) -> list[str]:
    """The context of each item with the first `shots` solved examples before it; one that is the
    item itself is left out."""
    contexts = []
    for item in items:
        shown = [one for one in examples[: shots + 1] if one != item][:shots]
        solved = (f"{one.context}{separator}{one.right}{BETWEEN_SHOTS}" for one in shown)
        contexts.append("".join(solved) + item.context)
    return contexts
