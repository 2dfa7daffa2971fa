"""Task files for models with a classification or multiple-choice head, converted to sequences. Each
JSON line has one or two texts with a label, or a question with its candidates (possible answers).

If the texts are too long for a sequence, the passage (the first text) is cut at its end. If the
sequence is still too long, the question, or the second text of a labelled sample, is also cut at
its end. A candidate is never cut. The result includes the number of sequences that were cut.
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
from ptdmpi.inference.lines import numbered_lines
from ptdmpi.inference.text import Text, token_ids

# the text that separates the passage, the question and the candidate in a sequence
BETWEEN = "\n"


@dataclass(frozen=True)
class LabelledItem:
    """One sample of a task file, as text.

    A sample has one sequence for each text in `seconds`. A sequence consists of the text `first`
    and one text of `seconds`. If the second text is "", the sequence consists of `first` only. If
    there are candidates, `question` is put before each second text. `place` is the file and the
    line, for error messages.
    """

    first: str
    seconds: tuple[str, ...]
    label: int
    place: str
    question: str = ""

    @property
    def joined(self) -> list[str]:
        """Return the second text of each sequence. If the sample is a question with candidates, the
        second text is the question followed by one candidate."""
        if not self.question:
            return list(self.seconds)
        return [f"{self.question}{BETWEEN}{second}" for second in self.seconds]


@dataclass(frozen=True)
class Framing:
    """The form of a model's sequences, which consist of one or two texts.

    A sequence of a masked model has the token `begin` before the texts and `separator` after each
    text. A sequence of a causal model has the tokens `text.prefix` before the texts. The model's
    vocabulary must have at least `needed` tokens.
    """

    text: Text
    model: ModelConfig
    begin: int
    separator: int
    needed: int

    @property
    def form(self) -> LabelledForm:
        """Return the form of the arrays that hold the sequences: length, padding id and token
        types."""
        last_type = 0 if self.model.token_types == 1 else 1
        # pad with the model's end-of-document id, which may differ from the tokenizer's id
        pad = self.text.eod
        return LabelledForm(self.model.seq_length, pad, self.model.masked, last_type)

    def room(self, texts: int) -> int:
        """Return how many tokens of text fit into a sequence that consists of `texts` texts."""
        frame = len(self.text.prefix)
        if self.model.masked:
            frame = 1 + texts
        return max(0, self.model.seq_length - frame)

    def row(self, first: Sequence[int], second: Sequence[int] | None) -> tuple[LabelledRow, int]:
        """Return the sequence of one or two texts, and the number of tokens that do not fit.

        If `second` is None, the sequence has only the text `first`.
        """
        rest = list(second or ())
        head = list(self.text.prefix)
        tail: list[int] = []
        if self.model.masked:
            head = [self.begin]
            tail = [self.separator]
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
    """Return the form of the sequences of `model` with the tokenizer of `text`.

    `name` is the argument of `load_tokenizer` for this tokenizer. Raise InputError if a sequence
    has no room for two texts of one token each.
    """
    size = text.tokenizer.vocab_size
    begin = text.eod
    separator = text.eod
    least = len(text.prefix)
    if model.masked:
        special, size = special_ids(token_ids(name), size)
        begin = special["begin"]
        separator = special["separator"]
        least = 3
    if model.seq_length < least + 2:
        raise InputError(f"model.seq_length = {model.seq_length}: a task needs {least + 2} or more")
    return Framing(text=text, model=model, begin=begin, separator=separator, needed=size)


def items(path: Path, task: TaskConfig) -> list[LabelledItem]:
    """Return the samples of a file, not yet tokenized.

    If `task.choices` is 0, all questions must have as many candidates as the first question. If a
    line is not a legal sample, raise an InputError that names the line.
    """
    samples: list[LabelledItem] = []
    for place, line in numbered_lines(path, "sample"):
        if task.kind == "choice":
            choices = task.choices
            if not choices and samples:
                choices = len(samples[0].seconds)
            samples.append(_question(item_of(line, place), line, choices, place))
        else:
            samples.append(_labelled(values_of(line, place, "text"), task, place))
    return samples


def _question(item: TaskItem, line: str, choices: int, place: str) -> LabelledItem:
    """Return the sample for a question that must have `choices` candidates (0: any number above
    one). Raise InputError if the number of candidates is not legal."""
    legal = choices or max(2, len(item.choices))
    if len(item.choices) != legal:
        raise InputError(
            f"{place}: {len(item.choices)} choices; legal: task.choices = {legal} of them"
        )
    question = _text(json.loads(line), "question", place)
    return LabelledItem(
        first=item.context,
        seconds=tuple(item.choices),
        label=item.answer,
        place=place,
        question=question,
    )


def _labelled(values: dict[str, Any], task: TaskConfig, place: str) -> LabelledItem:
    """Return the sample for one or two texts with a label. Raise InputError if the label is not
    one of `task.labels`, or if the second text is not a string."""
    label = values.get("label")
    name = label
    if isinstance(label, int) and not isinstance(label, bool):
        name = str(label)
    if name not in task.labels:
        raise InputError(f"{place}: 'label' = {label!r}; legal: {', '.join(task.labels)}")
    second = _text(values, "second", place)
    return LabelledItem(values["text"], (second,), task.labels.index(name), place)


def _text(values: dict[str, Any], key: str, place: str) -> str:
    """Return the text in the field `key`, or "" if there is no such field. Raise InputError if the
    field contains anything but a text."""
    text = values.get(key, "")
    if not isinstance(text, str):
        raise InputError(f"{place}: {key!r} = {text!r} is not a text")
    return text


def read(path: Path, task: TaskConfig, frame: Framing) -> LabelledFile:
    """Return the samples in a file as sequences of tokens.

    Raise InputError if the file cannot be read, or if a sequence has no room for a candidate. Also
    raise the same errors as `items`.
    """
    samples = items(path, task)
    tokenizer = frame.text.tokenizer
    between = "" if frame.model.masked else BETWEEN
    seconds = [f"{between}{text}" if text else "" for sample in samples for text in sample.joined]
    firsts = tokenizer.encode([sample.first for sample in samples])
    rest = iter(tokenizer.encode(seconds))
    rows: list[LabelledRow] = []
    cut_rows = 0
    lost_tokens = 0
    for sample, first in zip(samples, firsts, strict=True):
        for number, text in enumerate(sample.joined):
            ids = next(rest).tolist()
            lost_before = 0
            if task.kind == "choice" and len(ids) > frame.room(2):
                ids, lost_before = _with_candidate(sample, number, frame)
            row, lost = frame.row(first.tolist(), ids if text else None)
            lost += lost_before
            rows.append(row)
            cut_rows += lost > 0
            lost_tokens += lost
    return LabelledFile(
        path=path,
        tokenizer=tokenizer.name,
        tokenizer_sha256=tokenizer.sha256,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        rows=rows,
        sequences=len(samples[0].seconds),
        labels=np.array([sample.label for sample in samples], dtype=np.int64),
        cut=cut_rows,
        lost=lost_tokens,
    )


def _with_candidate(item: LabelledItem, number: int, frame: Framing) -> tuple[list[int], int]:
    """Return the tokens of a question and its candidate `number`, cut so that they fit into a
    sequence, and the number of tokens cut off.

    The question is cut at its end. Raise InputError if the candidate alone is too long.
    """
    between = "" if frame.model.masked else BETWEEN
    front = ""
    if item.question:
        front = f"{between}{item.question}"
        between = BETWEEN
    texts = [front, f"{between}{item.seconds[number]}"]
    question, candidate = (ids.tolist() for ids in frame.text.tokenizer.encode(texts))
    room = frame.room(2)
    if len(candidate) > room:
        raise InputError(
            f"{item.place}: choice {number} has {len(candidate)} tokens, but a sequence of "
            f"model.seq_length = {frame.model.seq_length} has room for {room}; legal: at most this "
            "many"
        )
    kept = question[: room - len(candidate)]
    return [*kept, *candidate], len(question) - len(kept)
