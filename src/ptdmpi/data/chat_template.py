"""Converting conversations to text by the chat template of a tokenizer, and finding the answers in
the text.

Templates are rendered by Jinja in a sandbox, with the functions that Hugging Face provides for
templates, except the clock. Without a clock, the same conversation always gives the same text.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ptdmpi.base.disk import read_file
from ptdmpi.config import InputError

# The name of the template's file in the folder of a tokenizer, and in the folder of shards that
# were made with the template.
TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
ANSWER = "assistant"  # the role of messages that are answers.
# The template for tokenizers without a chat template: one line "role: text" per message, with the
# end-of-document token after each answer.
PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Three Unicode noncharacters, which no text contains. BEGIN and END enclose the text of each {%
# generation %} block. To find out what a template writes before and after an answer, a conversation
# is rendered with ASKED in place of the answer.
BEGIN = "\ufdd0"
END = "\ufdd1"
ASKED = "\ufdd2"

Message = Mapping[str, str]


class Rendered(NamedTuple):
    """A conversation as text, and the positions of its answers: [start, stop) in characters."""

    text: str
    answers: list[tuple[int, int]]


class _Surroundings(NamedTuple):
    """The text that a template writes between the prompt for an answer and the answer, and the text
    that it writes directly after the answer."""

    before: str
    after: str


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template of a tokenizer.

    `source` is the Jinja text of the template. `said_of` names the file or the entry from which the
    template comes, for error messages. `special` has the texts of special tokens, by the names that
    templates use (such as `eos_token`).
    """

    source: str
    said_of: str
    special: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _compiled(self) -> Callable[..., str]:
        # import this module only when it is needed, because importing Jinja takes long
        from ptdmpi.data.jinja import compiled

        try:
            return compiled(self.source, lambda answer: f"{BEGIN}{answer}{END}")
        except ValueError as error:
            raise InputError(f"chat template of {self.said_of}: {error}") from None

    def render(self, messages: Sequence[Message], ask: bool = False) -> str:
        """Return the text of a conversation. If `ask` is True, the text ends with the prompt for an
        answer.

        Raise InputError if the template cannot be compiled, or refuses the conversation. If the
        template refuses the conversation, the message contains the text of the template's own
        error.
        """
        return self._marked(messages, ask).replace(BEGIN, "").replace(END, "")

    def _marked(self, messages: Sequence[Message], ask: bool = False) -> str:
        """Return the text of a conversation, with BEGIN and END around the text of each {%
        generation %} block."""
        render = self._compiled
        try:
            return render(messages=list(messages), add_generation_prompt=ask, **self.special)
        except Exception as error:  # a template may raise an exception of any class
            raise InputError(f"the chat template of {self.said_of} says: {error}") from None

    @cached_property
    def _around(self) -> _Surroundings:
        turns = [{"role": "user", "content": "a"}, {"role": ANSWER, "content": ASKED}]
        prompt = self.asks
        before, _, after = self.render(turns).partition(ASKED)
        if not before.startswith(prompt):
            return _Surroundings("", after)
        return _Surroundings(before.removeprefix(prompt), after)

    @property
    def asks(self) -> str:
        """Return the text of a conversation with a single user turn and the prompt for an answer.
        Raise the same errors as `render`."""
        return self.render([{"role": "user", "content": "a"}], ask=True)

    @property
    def lead(self) -> str:
        """Return the spaces that the template writes between the prompt for an answer and the
        answer. The result is empty if the template writes other text there. Raise the same errors
        as `render`."""
        lead = self._around.before
        return "" if lead.strip(" ") else lead

    def end_of_turn(self, special: Collection[str]) -> str | None:
        """Return the text of the special token that the template writes directly after an answer.
        If several texts in `special` match, return the longest; if no text matches, return None.
        Raise the same errors as `render`."""
        after = self._around.after.lstrip()
        ends = (text for text in special if after.startswith(text))
        return max(ends, key=len, default=None)

    def rendered(self, messages: Sequence[Message]) -> Rendered:
        """Return the text of a conversation, and the positions of the answers in this text.

        Answers are the texts of the template's {% generation %} blocks. If the template has no such
        blocks, an answer is the text of an assistant's turn that follows the prompt for the answer.
        The white space at the end of the turn does not belong to the answer. The spaces before an
        answer belong to the answer, because tokenizers put these spaces into the token of the next
        word.

        Raise the same errors as `render`. Also raise InputError if a template without such blocks
        changes the text of earlier turns when a later turn is added.
        """
        marked = self._marked(messages)
        if BEGIN in marked:
            return _of_marks(marked)
        answers: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] != ANSWER:
                continue
            before = self.render(messages[:number], ask=True)
            after = self.render(messages[: number + 1])
            if not (after.startswith(before) and marked.startswith(after.rstrip())):
                raise InputError(
                    f"the chat template of {self.said_of} writes the turns before answer "
                    f"{len(answers) + 1} differently once the answer follows; use a template that "
                    "only appends, or that marks answers by {% generation %}"
                )
            size = len(after[len(before) :].rstrip())
            answers.append((len(before), min(len(before) + size, len(marked))))
        return Rendered(marked, _with_spaces(marked, answers))


def _of_marks(marked: str) -> Rendered:
    """Return the text without the marks BEGIN and END. The answers are the parts of the text
    between these marks. Raise InputError for nested marks."""
    parts: list[str] = []
    answers: list[tuple[int, int]] = []
    length = 0
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
    """Return the positions of the answers. A non-empty answer is extended, so that it includes the
    spaces before it."""
    extended = []
    for start, stop in answers:
        if start < stop:
            start = len(text[:start].rstrip(" "))
        extended.append((start, stop))
    return extended


def find_template(tokenizer: Path | None, given: Path | None, eod: str) -> ChatTemplate:
    """Return the chat template for the tokenizer in the file `tokenizer` (None: the tokenizer has
    no file).

    The result is the first of these templates that exists: the file `given`, the file TEMPLATE in
    the tokenizer's folder, the entry `chat_template` of TOKENIZER_CONFIG in that folder, and
    `PLAIN`. `eod` is the text of the token for the end of a document. If TOKENIZER_CONFIG does not
    name an `eos_token`, the text `eod` is used as `eos_token`. Raise InputError for a file that
    cannot be read.
    """
    settings: dict[str, Any] = {}
    folder = None if tokenizer is None else tokenizer.parent
    if folder is not None and (folder / TOKENIZER_CONFIG).is_file():
        settings = json_object(folder / TOKENIZER_CONFIG)
    special = {"eos_token": eod, "bos_token": "", **_special(settings)}
    if given is not None:
        return ChatTemplate(_read(given), str(given), special)
    if folder is not None and (folder / TEMPLATE).is_file():
        return ChatTemplate(_read(folder / TEMPLATE), str(folder / TEMPLATE), special)
    own = settings.get("chat_template")
    if isinstance(own, list):  # the entry has several templates, each with a name
        named = {entry.get("name"): entry.get("template") for entry in own if type(entry) is dict}
        own = named.get("default")
    if isinstance(own, str):
        return ChatTemplate(own, f"{folder}/{TOKENIZER_CONFIG}", special)
    return ChatTemplate(PLAIN, "ptdmpi-data (the tokenizer has none)", special)


def _special(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens in `settings`, the content of TOKENIZER_CONFIG. The
    value of a special token is a text, or a table whose `content` is the text."""
    texts = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
    return texts


def _read(path: Path) -> str:
    try:
        return read_file(path).decode().replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from None


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise InputError if the file cannot be read, or does not
    contain an object."""
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: is not a JSON object")
    return value
