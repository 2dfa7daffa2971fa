"""Conversations as text: a tokenizer's own chat template, and which of the text are answers.

Templates are Jinja, in a sandbox, with what Hugging Face's have at hand; but no clock: the same
conversation is the same text every day.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ptdmpi.config import InputError

TEMPLATE = "chat_template.jinja"  # beside a tokenizer, and beside shards that were made with it
TOKENIZER_CONFIG = "tokenizer_config.json"
ANSWER = "assistant"  # the role whose turns are answers
# For tokenizers without a template: what was said, and behind each answer the end of document.
PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# What no text has: around what {% generation %} blocks write.
BEGIN, END = "\ufdd0", "\ufdd1"
ASKED = "\ufdd2"  # nor this, which stands for an answer

Message = Mapping[str, str]


class Rendered(NamedTuple):
    """A conversation as text, and its answers: [start, stop) in characters."""

    text: str
    answers: list[tuple[int, int]]


@dataclass(frozen=True)
class ChatTemplate:
    """`source`: Jinja; `said_of`: where it comes from; `special`: texts of special tokens by the
    names that templates have for them (eos_token)."""

    source: str
    said_of: str
    special: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _compiled(self) -> Any:
        from ptdmpi.data.jinja import compiled

        try:
            return compiled(self.source)
        except ValueError as error:
            raise InputError(f"chat template of {self.said_of}: {error}") from None

    def render(self, messages: Sequence[Message], ask: bool = False) -> str:
        """The text of a conversation; `ask`: and what an answer would stand behind. Raises
        InputError, with the template's own words where it refuses one."""
        return self._marked(messages, ask).replace(BEGIN, "").replace(END, "")

    def _marked(self, messages: Sequence[Message], ask: bool = False) -> str:
        template = self._compiled
        try:
            told = {"messages": list(messages), "add_generation_prompt": ask}
            return str(template.render(**told, **self.special))
        except Exception as error:  # of the template's own: any
            raise InputError(f"the chat template of {self.said_of} says: {error}") from None

    @cached_property
    def _around(self) -> tuple[str, str]:
        """What is written between what asks for an answer and the answer, and behind it."""
        turns = [{"role": "user", "content": "a"}, {"role": ANSWER, "content": ASKED}]
        asked, (whole, _, behind) = self.asks, self.render(turns).partition(ASKED)
        return whole.removeprefix(asked) if whole.startswith(asked) else "", behind

    @property
    def asks(self) -> str:
        """A text that ends in what asks for an answer. Raises InputError."""
        return self.render([{"role": "user", "content": "a"}], ask=True)

    @property
    def lead(self) -> str:
        """The spaces that are written in front of an answer, and not when it is asked for. Raises
        InputError."""
        lead, _ = self._around
        return "" if lead.strip(" ") else lead

    def end_of_turn(self, special: Collection[str]) -> str | None:
        """Which of some special tokens is written directly behind an answer; None where there is
        another text. Raises InputError."""
        _, behind = self._around
        ends = (one for one in special if behind.lstrip().startswith(one))
        return max(ends, key=len, default=None)

    def rendered(self, messages: Sequence[Message]) -> Rendered:
        """A conversation with its answers: what the template's own {% generation %} blocks write;
        without such, of each turn of the assistant what stands behind the text that asks for it,
        but no white space behind the end of the turn. Spaces in front of an answer are its own, as
        tokenizers have them in the token of the word behind. Raises InputError, also where the
        text of a conversation does not begin with that of its first turns.
        """
        marked = self._marked(messages)
        if BEGIN in marked:
            return _of_marks(marked)
        answers: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] != ANSWER:
                continue
            before = self.render(messages[:number], ask=True)
            behind = self.render(messages[: number + 1])
            if not (behind.startswith(before) and marked.startswith(behind.rstrip())):
                raise InputError(
                    f"the chat template of {self.said_of} writes the turns before answer "
                    f"{len(answers) + 1} differently once it is there; legal: one that only adds, "
                    "or that marks answers by {% generation %}"
                )
            answer, content = behind[len(before) :], message["content"].strip()
            # white space of the answer itself is its own
            least = answer.find(content) + len(content) if content in answer else 0
            stop = max(least, len(answer.rstrip()))
            answers.append((len(before), min(len(before) + stop, len(marked))))
        return Rendered(marked, _with_spaces(marked, answers))


def _of_marks(marked: str) -> Rendered:
    parts, answers, length = [], list[tuple[int, int]](), 0
    for number, piece in enumerate(marked.split(BEGIN)):
        answer, mark, rest = piece.partition(END)
        if number:
            answers.append((length, length + len(answer)))
        parts += [answer, rest]
        length += len(answer) + len(rest)
        if bool(number) != bool(mark):
            raise InputError("a chat template has {% generation %} blocks inside each other")
    text = "".join(parts)
    return Rendered(text, _with_spaces(text, answers))


def _with_spaces(text: str, answers: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that are not empty with the spaces in front of them."""
    return [(len(text[:a].rstrip(" ")) if a < b else a, b) for a, b in answers]


def find_template(tokenizer: Path | None, given: Path | None, eod: str) -> ChatTemplate:
    """The template in the file `given`; else the one that lies beside the tokenizer's file; else
    `PLAIN`. `eod`: the text of the end of document, for templates whose tokenizer says nothing of
    an eos_token. Raises InputError for a file that cannot be read."""
    said: dict[str, Any] = {}
    folder = None if tokenizer is None else tokenizer.parent
    if folder is not None and (folder / TOKENIZER_CONFIG).is_file():
        said = json_object(folder / TOKENIZER_CONFIG)
    special = {"eos_token": eod, "bos_token": "", **_special(said)}
    if given is not None:
        return ChatTemplate(_read(given), str(given), special)
    if folder is not None and (folder / TEMPLATE).is_file():
        return ChatTemplate(_read(folder / TEMPLATE), str(folder / TEMPLATE), special)
    own = said.get("chat_template")
    if isinstance(own, list):  # of several, by name
        named = {one.get("name"): one.get("template") for one in own if isinstance(one, dict)}
        own = named.get("default")
    if isinstance(own, str):
        return ChatTemplate(own, f"{folder}/{TOKENIZER_CONFIG}", special)
    return ChatTemplate(PLAIN, "ptdmpi-data (the tokenizer has none)", special)


def _special(said: Mapping[str, Any]) -> dict[str, str]:
    """Texts of special tokens: a text, or a table with its `content`."""
    found = {}
    for name, value in said.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from None


def json_object(path: Path) -> dict[str, Any]:
    """What a file beside a tokenizer says. Raises InputError for one that cannot be read."""
    try:
        said = json.loads(_read(path))
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    if not isinstance(said, dict):
        raise InputError(f"{path}: is no JSON object")
    return said
