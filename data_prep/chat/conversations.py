"""Lines of JSON to conversations, and these to tokens of which only answers count as labels."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from data_prep.encode import lines
from data_prep.sources import Task
from data_prep.vocabulary import MarkedTokenizer
from ptdmpi.config import InputError
from ptdmpi.data.chat_template import ANSWER, ChatTemplate, Message


@dataclass(frozen=True)
class ChatFields:
    """In which fields of a line a conversation stands: `messages`, a list of {"role", "content"},
    or a `prompt` and its `answer`."""

    messages: str = "messages"
    prompt: str = "prompt"
    answer: str = "answer"


class Conversation(NamedTuple):
    """A conversation as tokens: ids [n]; weights bool [n], whether each counts as a label; answers
    [a], where each of its answers begins; and its text."""

    ids: np.ndarray
    weights: np.ndarray
    answers: np.ndarray
    text: str


class BadConversation(ValueError):
    """What is wrong with a line."""


class Conversations:
    """Reads tasks of .jsonl lines as conversations. `skip_bad_lines`: they are left out, and
    `bad_lines` counts them."""

    def __init__(
        self,
        tokenizer: MarkedTokenizer,
        template: ChatTemplate,
        fields: ChatFields,
        skip_bad_lines: bool,
    ) -> None:
        self._tokenizer, self._template, self._fields = tokenizer, template, fields
        self._skip_bad_lines = skip_bad_lines
        self.bad_lines = 0

    def __call__(self, task: Task) -> list[Conversation]:
        """Those of a task, in their order. Raises InputError that names file and line."""
        rendered = []
        for chunk in task.chunks:
            for number, (_, line) in enumerate(lines(chunk.data), chunk.line):
                if not bytes(line).strip():
                    continue
                try:
                    found = self._template.rendered(self._messages(bytes(line)))
                    if not found.answers:
                        raise BadConversation(f"no turn of the role {ANSWER!r}: nothing to learn")
                    rendered.append(found)
                except (BadConversation, InputError) as error:
                    if not self._skip_bad_lines:
                        raise InputError(f"{chunk.path}:{number}: {error}") from None
                    self.bad_lines += 1
        encoded = self._tokenizer.encode_marked([one.text for one in rendered])
        return [
            Conversation(ids, counted(starts, one.answers), firsts(starts, one.answers), one.text)
            for one, (ids, starts) in zip(rendered, encoded, strict=True)
        ]

    def _messages(self, line: bytes) -> list[Message]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadConversation(f"not a JSON line: {error}") from None
        if not isinstance(record, dict):
            raise BadConversation("no JSON object")
        messages = _messages(record, self._fields)
        for message in messages:
            named = [one for one in sorted(self._tokenizer.special) if one in message["content"]]
            if named:
                raise BadConversation(
                    f"a message has the text {named[0]}, which the template would make a special "
                    "token of"
                )
        return messages


def _messages(record: Mapping[str, Any], fields: ChatFields) -> list[Message]:
    if fields.messages in record:
        found = record[fields.messages]
    elif isinstance(record.get(fields.prompt), str) and isinstance(record.get(fields.answer), str):
        texts = zip(("user", ANSWER), (fields.prompt, fields.answer), strict=True)
        found = [{"role": role, "content": record[name]} for role, name in texts]
    else:
        raise BadConversation(
            f"neither {fields.messages!r} nor texts in {fields.prompt!r} and {fields.answer!r}"
        )
    if not isinstance(found, list) or not found:
        raise BadConversation(f"{fields.messages!r} is no list of messages")
    for message in found:
        known = isinstance(message, dict)
        texts_of = [message.get(key) for key in ("role", "content")] if known else [None]
        if not all(isinstance(text, str) for text in texts_of):
            raise BadConversation('a message is no {"role": TEXT, "content": TEXT}')
        for text in texts_of:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise BadConversation("a message has a lone surrogate") from None
    return found


def counted(starts: np.ndarray, answers: Sequence[tuple[int, int]]) -> np.ndarray:
    """bool [n]: which tokens, that begin at characters `starts`, begin inside an answer."""
    weights = np.zeros(starts.size, dtype=bool)
    for begin, end in answers:
        weights |= (starts >= begin) & (starts < end)
    return weights


def firsts(starts: np.ndarray, answers: Sequence[tuple[int, int]]) -> np.ndarray:
    """int [answers]: the first token of each, of tokens that begin at characters `starts`."""
    return np.searchsorted(starts, [begin for begin, _ in answers])


def pieces(tasks: Iterator[Task], read: Conversations) -> Iterator[Conversation]:
    """The conversations of all tasks, in their order."""
    for task in tasks:
        yield from read(task)
