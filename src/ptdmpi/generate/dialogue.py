"""Conversations as tokens: the chat template of a model, and the ids that end its answers."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from ptdmpi.data.chat_template import ANSWER, ChatTemplate
from ptdmpi.inference.stored import StoredAdapter, StoredModel
from ptdmpi.inference.text import Text, ends_of, find_chat


@dataclass(frozen=True)
class Dialogue:
    """The form in which a model gets a conversation and continues it with the next answer.

    `template` is the model's chat template; None means plain lines. `ends` are the ids that end an
    answer.
    """

    text: Text
    template: ChatTemplate | None
    ends: frozenset[int]

    @classmethod
    def of(cls, stored: StoredModel, text: Text, adapter: StoredAdapter | None) -> Self:
        """Return the dialogue for a model, with the chat template of the model or of an adapter.

        Answers end with the ids that end texts. With a template, answers also end with the special
        token that the template writes after an answer, and with the ids in the config.json of a
        model from Hugging Face. Raises InputError.
        """
        template = find_chat(stored, text, adapter)
        if template is None:
            return cls(text, None, text.ends)
        ends = text.ends.union(ends_of(stored))
        turn = template.end_of_turn(text.special)
        if turn is not None:
            ends = ends.union(text.marked(turn))
        return cls(text, template, ends)

    def prompt(self, lines: Sequence[str]) -> list[int]:
        """Return the ids of a conversation up to the next answer. `lines` are the user's lines and
        the answers, alternating."""
        if self.template is None:
            return self.text.prompt("".join(line.removesuffix("\n") + "\n" for line in lines))
        turns = zip(itertools.cycle(("user", ANSWER)), lines, strict=False)
        messages = [{"role": role, "content": content} for role, content in turns]
        return self._without_spaces(self.template.render(messages, ask=True), self._left)

    def answer(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text of the answer `ids` to a prompt.

        The leading spaces that the template writes itself are removed.
        """
        answer = self.text.behind(prompt, ids)
        if self.template is None:
            return answer
        spaces = len(answer) - len(answer.lstrip(" "))
        return answer[min(self._left + len(self.template.lead), spaces) :]

    @cached_property
    def _left(self) -> int:
        """Return the number of spaces at the end of a prompt that must be left out.

        Spaces before an answer are not separate tokens. The spaces become part of the answer's
        first token, such as " word".
        """
        if self.template is None:
            return 0
        asks = self.template.asks
        whole = self.text.marked(f"{asks}{self.template.lead}a")
        for left in range(len(asks) - len(asks.rstrip(" ")) + 1):
            ids = self._without_spaces(asks, left)
            if whole[: len(ids)] == ids:
                return left
        return 0  # leaving out spaces would change other tokens, too

    def _without_spaces(self, asks: str, left: int) -> list[int]:
        """Return the ids of a template's text without its last `left` characters."""
        return self.text.marked(asks[: len(asks) - left])

    @property
    def around(self) -> int:
        """Return the number of ids that a prompt contains in addition to the ids of its line."""
        if self.template is None:
            return len(self.text.prefix)
        return len(self.prompt([""]))
