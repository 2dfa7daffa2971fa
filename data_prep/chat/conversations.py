"""Reading of conversations, or pairs of conversations, from JSON lines, and their encoding as token
ids with label weights. The label weight of a token is 1 if the token belongs to an answer, and 0
otherwise."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from data_prep.chat.forms import BadConversation, counted_answers
from data_prep.encode import lines
from data_prep.sources import Task
from data_prep.vocabulary import MarkedTokenizer
from ptdmpi.config import InputError
from ptdmpi.data.chat_template import ANSWER, ChatTemplate, Message, Rendered


class Conversation(NamedTuple):
    """A conversation. `ids` are the token ids, int [tokens]. `weights` are the label weights of the
    tokens, bool [tokens]. `answers` are the indices of the first tokens of the answers, int
    [answers]. `text` is the conversation as text."""

    ids: np.ndarray
    weights: np.ndarray
    answers: np.ndarray
    text: str


# the conversations of one record: a single conversation, or a preferred and a rejected conversation
Group = list[Conversation]


class Conversations:
    """A reader of conversations from JSON lines. `messages_of` is a function that takes a record,
    and returns the messages of each conversation in this record. The function raises
    BadConversation if the record has no conversation. If `skip_bad_lines` is True, lines that
    cannot be used are left out, and counted in `bad_lines`."""

    def __init__(
        self,
        tokenizer: MarkedTokenizer,
        template: ChatTemplate,
        messages_of: Callable[[Mapping[str, Any]], list[list[Message]]],
        skip_bad_lines: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._messages_of = messages_of
        self._skip_bad_lines = skip_bad_lines
        self.bad_lines = 0

    def __call__(self, task: Task) -> list[Group]:
        """Return, for each record of `task` in order, the conversations of the record. A task
        consists of some lines of the input (see `sources.Task`). If a line cannot be used and
        `skip_bad_lines` is False, raise an InputError that names the file and the line."""
        rendered = []
        sizes = []  # number of conversations of each record
        for chunk in task.chunks:
            for number, (_, line) in enumerate(lines(chunk.data), chunk.line):
                if not bytes(line).strip():
                    continue
                try:
                    group = [self._rendered(one) for one in self._messages(bytes(line))]
                    rendered += group
                    sizes.append(len(group))
                except (BadConversation, InputError) as error:
                    if not self._skip_bad_lines:
                        raise InputError(f"{chunk.path}:{number}: {error}") from None
                    self.bad_lines += 1
        encoded = self._tokenizer.encode_marked([text for text, _ in rendered])
        conversations = (
            Conversation(ids, counted(starts, answers), firsts(starts, answers), text)
            for (text, answers), (ids, starts) in zip(rendered, encoded, strict=True)
        )
        return [list(islice(conversations, size)) for size in sizes]

    def _rendered(self, messages: Sequence[Message]) -> Rendered:
        """Return the text of a conversation, and the spans (ranges of characters) of those answers
        that are labels. Raise BadConversation if no answer is a label."""
        text, spans = self._template.rendered(messages)
        answers = counted_answers(messages, spans)
        if not answers:
            raise BadConversation(f"no turn of the role {ANSWER!r}: nothing to learn")
        return Rendered(text, answers)

    def _messages(self, line: bytes) -> list[list[Message]]:
        """Return a list of messages for each conversation in a line. Raise BadConversation if the
        line has no messages, or if a message contains the name of a special token."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadConversation(f"not a JSON line: {error}{_of_array(line)}") from None
        if not isinstance(record, dict):
            raise BadConversation(f"no JSON object{_of_array(line)}")
        conversations = self._messages_of(record)
        for message in chain.from_iterable(conversations):
            texts = list(_texts(message))
            if not all(map(_is_unicode, texts)):
                raise BadConversation("a message has a lone surrogate")
            for special in sorted(self._tokenizer.special):
                if any(special in text for text in texts):
                    raise BadConversation(
                        f"a message has the text {special}, which would become a special token"
                    )
        return conversations


def _of_array(line: bytes) -> str:
    """Return a hint for an error message if a line begins like a JSON array."""
    return "; a file with a JSON array must end in .json" if line.lstrip()[:1] == b"[" else ""


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield every text in a message, including keys and the texts in nested values. A template may
    write any of these texts, for example a role, a name or the arguments of a tool call."""
    left: list[Any] = [message]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            left += value


def _is_unicode(text: str) -> bool:
    """Return False if a text contains a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def counted(starts: np.ndarray, answers: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return a bool array [tokens] that is True for each token that begins inside an answer. Token
    i begins at character `starts[i]`. `answers` are the spans (ranges of characters) of the
    answers."""
    weights = np.zeros(starts.size, dtype=bool)
    for begin, end in answers:
        weights |= (starts >= begin) & (starts < end)
    return weights


def firsts(starts: np.ndarray, answers: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the index of the first token of each answer, int [answers]. Token i begins at
    character `starts[i]`. `answers` are the spans (ranges of characters) of the answers."""
    return np.searchsorted(starts, [begin for begin, _ in answers])


def pieces(tasks: Iterator[Task], read: Conversations) -> Iterator[Group]:
    """Yield, for each record of all tasks in order, the conversations of the record. `read` is the
    reader of the tasks."""
    for task in tasks:
        yield from read(task)
