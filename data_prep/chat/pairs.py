"""The common formats of preference pairs. A pair consists of a preferred answer and a rejected
answer to the same prompt.

A record has the fields "chosen" and "rejected". Each of these two fields has one of the following
values:

- a text, or one message: the answer; the prompt is in another field (see `_prompt`)
- a list of messages that begins with an answer; the prompt is in another field (TRL's
  conversational format)
- a list of messages that begins with a question: the complete conversation
- a text "\\n\\nHuman: ...\\n\\nAssistant: ...": the complete conversation (Bai et al. 2022, arXiv
  2204.05862)

The two conversations of a pair may begin with the same turns. Only the answers after these shared
turns are compared, and only these answers are labels.
"""

import re
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from data_prep.chat.forms import (
    BadConversation,
    exchange,
    has_texts,
    instruction_of,
    turns_of,
    with_system,
)
from ptdmpi.data.chat_template import ANSWER, Message

ANSWERS = ("chosen", "rejected")
KNOWN = (
    'legal are {"chosen", "rejected"} with whole conversations, or with answers to "prompt", '
    '"question", "instruction" or "conversations"'
)
_SPEAKER = re.compile(r"\n\n(Human|Assistant):[ ]?")
_ROLES = {"Human": "user", "Assistant": ANSWER}


def pair_of(record: Mapping[str, Any]) -> list[list[Message]]:
    """Return two conversations: one with the preferred answer, and one with the rejected answer.

    Answers in the shared turns at the beginning get the "weight" 0, so that they are not labels.
    Raise BadConversation if the record has none of the known formats, or if a conversation has no
    answer after these shared turns.
    """
    if any(name not in record for name in ANSWERS):
        raise BadConversation(f"no pair of answers: {KNOWN}")
    whole = [_conversation(record, name) for name in ANSWERS]
    same = takewhile(lambda turns: turns[0] == turns[1], zip(*whole, strict=False))
    shared = sum(1 for _ in same)
    for name, messages in zip(ANSWERS, whole, strict=True):
        if all(message["role"] != ANSWER for message in messages[shared:]):
            raise BadConversation(f'"{name}" has no answer of its own')
    return [
        [_as_context(message) for message in messages[:shared]] + messages[shared:]
        for messages in whole
    ]


def _as_context(message: Message) -> Message:
    """Return the message `message`. If the message is an answer, add the "weight" 0, so that its
    tokens are not labels."""
    if message["role"] != ANSWER:
        return message
    return {**message, "weight": 0}


def _conversation(record: Mapping[str, Any], name: str) -> list[Message]:
    """Return the complete conversation whose answer is in the field `name`."""
    given = record[name]
    if isinstance(given, str):
        spoken = _spoken(given)
        return spoken or [*_prompt(record), *exchange("", given)[1:]]
    messages = turns_of([given] if isinstance(given, dict) else given, name)
    if messages[0]["role"] == ANSWER:
        return [*_prompt(record), *messages]
    return with_system(record, messages)


def _spoken(text: str) -> list[Message]:
    """Return the turns of a text in which each turn begins with the name of a speaker. Return [] if
    the text has no such names."""
    before, *parts = _SPEAKER.split(text)
    if before.strip() or not parts:
        return []
    pairs = zip(parts[::2], parts[1::2], strict=True)
    turns = [{"role": _ROLES[speaker], "content": said.strip()} for speaker, said in pairs]
    if not turns[-1]["content"]:  # the text is a prompt that ends with the next speaker's name
        turns.pop()
    return turns


def _prompt(record: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a record's prompt. Raise BadConversation if the record has no
    prompt."""
    for name in ("prompt", "conversations", "messages"):
        if isinstance(record.get(name), list):
            return with_system(record, turns_of(record[name], name))
    if has_texts(record, "instruction"):
        return with_system(record, exchange(instruction_of(record), "")[:1])
    for name in ("prompt", "question", "input"):
        if has_texts(record, name):
            spoken = _spoken(record[name])
            return spoken or with_system(record, exchange(record[name], "")[:1])
    raise BadConversation(f"no prompt: {KNOWN}")
