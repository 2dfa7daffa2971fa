"""The common formats of conversations. The format of a record is recognized by its keys. This
module converts records to messages.

- OpenAI: {"messages": [{"role": "user", "content": TEXT}, ...]}. A content may also be a list of
  parts {"type": "text", "text": TEXT}. An answer with "weight": 0 is only context, and not a label.
- ShareGPT: {"conversations": [{"from": "human", "value": TEXT}, ...]}, and optionally "system".
- alpaca (Taori et al. 2023): {"instruction": TEXT, "input": TEXT or "", "output": TEXT}, and
  optionally "system" and "history", a list of [question, answer].
- A question and its answer: two texts, in two fields whose names are one of the pairs in `PAIRS`,
  or two lists of messages (TRL's "prompt" and "completion").

In the first two formats, each turn in a list may have the keys of either format, because some files
mix the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptdmpi.data.chat_template import ANSWER, Message

# name of a speaker in files of ShareGPT's format -> role
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": ANSWER,
    "assistant": ANSWER,
    "chatgpt": ANSWER,
    "bard": ANSWER,
    "bing": ANSWER,
    "model": ANSWER,
    "tool": "tool",
    "observation": "tool",
}
# the usual names of the two fields for a question and its answer
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("input", "output"),
)
KNOWN = (
    'legal are {"messages": [...]} (OpenAI), {"conversations": [...]} (ShareGPT), {"instruction", '
    '"input", "output"} (alpaca), or a prompt and its answer'
)


class BadConversation(ValueError):
    """The error for a record that cannot be converted to a conversation. Its text describes the
    mistake."""


@dataclass(frozen=True)
class ChatFields:
    """The names of the fields that contain a conversation. These names are tried before the usual
    field names. `messages` is the name of the field with a list of messages; `prompt` and `answer`
    are the names of the fields with a prompt and its answer."""

    messages: str = "messages"
    prompt: str = "prompt"
    answer: str = "answer"


def messages_of(record: Mapping[str, Any], fields: ChatFields) -> list[Message]:
    """Return the messages in a record, each with the texts "role" and "content".

    Raise BadConversation if the record has none of the known formats, or if a message is malformed.
    """
    for name in (fields.messages, "messages", "conversations"):
        if name in record:
            return with_system(record, turns_of(record[name], name))
    if has_texts(record, "instruction", "output"):
        return _alpaca(record)
    for question, answer in ((fields.prompt, fields.answer), *PAIRS):
        if has_texts(record, question, answer):
            return with_system(record, exchange(record[question], record[answer]))
        if isinstance(record.get(question), list) and isinstance(record.get(answer), list):
            return turns_of(record[question], question) + turns_of(record[answer], answer)
    raise BadConversation(f"no conversation: {KNOWN}")


def has_texts(record: Mapping[str, Any], *names: str) -> bool:
    """Return True if the record has a text in each of the fields `names`."""
    return all(isinstance(record.get(name), str) for name in names)


def exchange(question: str, answer: str) -> list[Message]:
    """Return a question and its answer as two messages."""
    return [{"role": "user", "content": question}, {"role": ANSWER, "content": answer}]


def with_system(record: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Return `messages`. If the record has a text in the field "system", a system message with this
    text is inserted at the beginning. Raise BadConversation if "system" is not a text, or if the
    messages already begin with a system message."""
    text = record.get("system")
    if not text:
        return messages
    if not isinstance(text, str):
        raise BadConversation('"system" is not a text')
    if messages[0]["role"] == "system":
        raise BadConversation('both "system" and the first message are a system prompt')
    return [{"role": "system", "content": text}, *messages]


def _alpaca(record: Mapping[str, Any]) -> list[Message]:
    """Return the messages of an alpaca record. If the record has an input, the input is added to
    the instruction on a new line."""
    history = record.get("history") or []
    earlier: list[Message] = []
    if not isinstance(history, list):
        raise BadConversation('"history" is not a list of [question, answer]')
    for turn in history:
        is_pair = isinstance(turn, list) and len(turn) == 2
        if not is_pair or not all(isinstance(text, str) for text in turn):
            raise BadConversation('"history" is not a list of [question, answer]')
        earlier += exchange(*turn)
    return with_system(record, earlier + exchange(instruction_of(record), record["output"]))


def instruction_of(record: Mapping[str, Any]) -> str:
    """Return the instruction of an alpaca record. If the record has an input, the input is added on
    a new line. Raise BadConversation if the input is not a text."""
    more = record.get("input") or ""
    if not isinstance(more, str):
        raise BadConversation('"input" is not a text')
    return "\n".join(filter(None, (record["instruction"], more)))


def turns_of(turns: Any, name: str) -> list[Message]:
    """Return the messages in `turns`, which is the value of the field `name`. Each turn has the
    keys of OpenAI's or ShareGPT's format."""
    if not isinstance(turns, list) or not turns:
        raise BadConversation(f'"{name}" is not a list of messages')
    return [_message(turn) for turn in turns]


def _message(turn: Any) -> Message:
    """Convert a turn to a message whose "role" and "content" are texts. Other keys are not removed,
    because the chat template may use them."""
    if not isinstance(turn, dict):
        raise BadConversation('a message is not {"role": TEXT, "content": TEXT}')
    if "from" in turn and "role" not in turn:
        speaker = turn["from"]
        if not isinstance(speaker, str) or speaker.lower() not in ROLES:
            raise BadConversation(
                f"a message is from {speaker!r}; legal are {', '.join(sorted(ROLES))}"
            )
        turn = {"role": ROLES[speaker.lower()], "content": turn.get("value")}
    content = turn.get("content")
    if isinstance(content, list):
        turn = {**turn, "content": _joined(content)}
    if not has_texts(turn, "role", "content"):
        raise BadConversation('a message is not {"role": TEXT, "content": TEXT}')
    return turn


def _joined(parts: Sequence[Any]) -> str:
    """Return the text of a message whose content is a list of parts. Raise BadConversation for a
    part that is not text."""
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise BadConversation('a part of a content is not {"type": "text", "text": TEXT}')
    return "".join(part["text"] for part in parts)


def counted_answers(
    messages: Sequence[Message], answers: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the spans (ranges of characters) of the answers that are labels: all answers except
    those in messages with "weight" 0.

    `answers` are the spans of all answers in the text, in the order of the messages. Raise
    BadConversation for a weight other than 0 and 1. Also raise BadConversation if a message has
    "weight" 0 but the template does not write each answer exactly once.
    """
    weights = [message.get("weight", 1) for message in messages if message["role"] == ANSWER]
    if any(weight not in (0, 1) for weight in weights):
        raise BadConversation('the "weight" of a message is neither 0 nor 1')
    if all(weights):
        return list(answers)
    if len(weights) != len(answers):
        raise BadConversation('a message has "weight": 0, but the template writes no answer for it')
    return [span for span, weight in zip(answers, weights, strict=True) if weight]
