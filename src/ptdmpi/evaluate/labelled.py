"""Task files for heads: JSON lines of texts with a label, or of questions with candidates, as the
sequences of a model.

A text that a sequence has no room for loses the end of its first part (the passage), then that of
its question, and nothing of the candidate. Cuts are counted.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptdmpi.config import InputError, ModelConfig, TaskConfig
from ptdmpi.data.labelled import LabelledFile, LabelledForm, LabelledRow
from ptdmpi.data.words import special_ids
from ptdmpi.evaluate.tasks import TaskItem, item_of, values_of
from ptdmpi.generate.text import Text, token_ids
from ptdmpi.inference.lines import numbered_lines

BETWEEN = "\n"  # of a passage, a question and an answer, for a model that reads them as one text


@dataclass(frozen=True)
class LabelledItem:
    """One sample as text: `first`, and one `second` for each of its sequences ("": none), in front
    of which stands the `question`, of candidates."""

    first: str
    seconds: tuple[str, ...]
    label: int
    place: str
    question: str = ""

    @property
    def joined(self) -> list[str]:
        """The second texts of its sequences as they are read: questions with their candidates."""
        front = f"{self.question}{BETWEEN}" if self.question else ""
        return [f"{front}{second}" for second in self.seconds]


@dataclass(frozen=True)
class Framing:
    """How texts become the sequences of a model. A masked one has `begin` in front and `separator`
    behind each text, for which its vocabulary is to have `needed` rows; others `text.prefix`."""

    text: Text
    model: ModelConfig
    begin: int
    separator: int
    needed: int

    @property
    def form(self) -> LabelledForm:
        last_type = 0 if self.model.token_types == 1 else 1
        # an id of the model, which the end of document of a tokenizer need not be
        pad = self.text.eod
        return LabelledForm(self.model.seq_length, pad, self.model.masked, last_type)

    def room(self, texts: int) -> int:
        """Tokens that a sequence has room for, of so many texts."""
        frame = 1 + texts if self.model.masked else len(self.text.prefix)
        return max(0, self.model.seq_length - frame)

    def row(self, first: Sequence[int], second: Sequence[int] | None) -> tuple[LabelledRow, int]:
        """The sequence of one text, or of two; and how many tokens it has no room for."""
        rest = list(second or ())
        if self.model.masked:
            head, tail = [self.begin], [self.separator]
        else:
            head, tail = list(self.text.prefix), []
        room = self.room(1 if second is None else 2)
        kept = rest[:room]
        front = list(first[: room - len(kept)])
        ids = [*head, *front, *tail]
        start = len(ids)
        if second is not None:
            ids += [*kept, *tail]
        lost = len(first) + len(rest) - len(front) - len(kept)
        return LabelledRow(np.array(ids or [self.text.eod], dtype=np.int32), start), lost


def framing(text: Text, name: str, model: ModelConfig) -> Framing:
    """`name` is what `load_tokenizer` takes for the tokenizer of `text`. Raises InputError where a
    sequence has no room for two texts."""
    size = text.tokenizer.vocab_size
    if model.masked:
        found, size = special_ids(token_ids(name), size)
        begin, separator = found["begin"], found["separator"]
    else:
        begin = separator = text.eod
    least = 3 if model.masked else len(text.prefix)
    if model.seq_length < least + 2:
        raise InputError(f"model.seq_length = {model.seq_length}: a task needs {least + 2} or more")
    return Framing(text, model, begin, separator, size)


def items(path: Path, task: TaskConfig) -> list[LabelledItem]:
    """The samples of a file as text; where the task does not say how many candidates a question
    has, the first has as many as all. Raises InputError with the line."""
    found: list[LabelledItem] = []
    for place, line in numbered_lines(path, "sample"):
        if task.kind == "choice":
            choices = task.choices or (len(found[0].seconds) if found else 0)
            found.append(_question(item_of(line, place), line, choices, place))
        else:
            found.append(_labelled(values_of(line, place, "text"), task, place))
    return found


def _question(item: TaskItem, line: str, choices: int, place: str) -> LabelledItem:
    legal = choices or max(2, len(item.choices))
    if len(item.choices) != legal:
        raise InputError(
            f"{place}: {len(item.choices)} choices; legal: task.choices = {legal} of them"
        )
    question = _text(json.loads(line), "question", place)
    return LabelledItem(item.context, tuple(item.choices), item.answer, place, question)


def _labelled(values: dict[str, Any], task: TaskConfig, place: str) -> LabelledItem:
    label = values.get("label")
    name = str(label) if isinstance(label, int) and not isinstance(label, bool) else label
    if name not in task.labels:
        raise InputError(f"{place}: 'label' = {label!r}; legal: {', '.join(task.labels)}")
    second = _text(values, "second", place)
    return LabelledItem(values["text"], (second,), task.labels.index(name), place)


def _text(values: dict[str, Any], key: str, place: str) -> str:
    found = values.get(key, "")
    if not isinstance(found, str):
        raise InputError(f"{place}: {key!r} = {found!r} is no text")
    return found


def read(path: Path, task: TaskConfig, frame: Framing) -> LabelledFile:
    """The samples of a file as sequences. Raises InputError as `items` does, and where the file
    cannot be read, or a sequence has no room for a candidate."""
    every = items(path, task)
    encode = frame.text.tokenizer.encode
    between = "" if frame.model.masked else BETWEEN
    seconds = [f"{between}{one}" if one else "" for item in every for one in item.joined]
    firsts, rest = encode([item.first for item in every]), iter(encode(seconds))
    rows, cut, lost = [], 0, 0
    for item, first in zip(every, firsts, strict=True):
        for number, one in enumerate(item.joined):
            ids, early = next(rest).tolist(), 0
            if task.kind == "choice" and len(ids) > frame.room(2):
                ids, early = _with_candidate(item, number, frame)
            row, gone = frame.row(first.tolist(), ids if one else None)
            rows.append(row)
            cut, lost = cut + (gone + early > 0), lost + gone + early
    labels = np.array([item.label for item in every], dtype=np.int64)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    known = frame.text.tokenizer
    counts = (len(every[0].seconds), labels, cut, lost)
    return LabelledFile(path, known.name, known.sha256, digest, rows, *counts)


def _with_candidate(item: LabelledItem, number: int, frame: Framing) -> tuple[list[int], int]:
    """The tokens of a question and its candidate that a sequence has room for, which is not all:
    the question loses its end; and how many it loses. Raises InputError where the candidate alone
    is too long."""
    between = "" if frame.model.masked else BETWEEN
    front = f"{between}{item.question}" if item.question else ""
    candidate = f"{BETWEEN if item.question else between}{item.seconds[number]}"
    question, kept = (one.tolist() for one in frame.text.tokenizer.encode([front, candidate]))
    room = frame.room(2)
    if len(kept) > room:
        raise InputError(
            f"{item.place}: choice {number} has {len(kept)} tokens, and of model.seq_length = "
            f"{frame.model.seq_length} a sequence has room for {room}; legal: at most so many"
        )
    found = [*question[: room - len(kept)], *kept]
    return found, len(question) + len(kept) - len(found)
