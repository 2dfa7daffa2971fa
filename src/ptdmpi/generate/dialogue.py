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
    """The conversion of a conversation to token ids for one model, and of token ids to an answer.

    `template` is the model's chat template; None means plain lines. `ends` are the token ids that
    end an answer.
    """

    text: Text
    template: ChatTemplate | None
    ends: frozenset[int]

    @classmethod
    def of(cls, stored: StoredModel, text: Text, adapter: StoredAdapter | None) -> Self:
        """Return the `Dialogue` for a model. The chat template is the template of the adapter, or
        else the template of the model.

        Every token id that ends a text also ends an answer. If there is a chat template, two more
        kinds of ids end an answer. The first kind is the special token that the template writes
        after an answer. The second kind are the end ids in the config.json of a model from Hugging
        Face. Raise InputError if one of these files cannot be used.
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
        """Return the token ids of a conversation up to the next answer. `lines` are the user's
        lines and the answers, alternating."""
        if self.template is None:
            return self.text.prompt("".join(line.removesuffix("\n") + "\n" for line in lines))
        turns = zip(itertools.cycle(("user", ANSWER)), lines, strict=False)
        messages = [{"role": role, "content": content} for role, content in turns]
        return self._without_spaces(self.template.render(messages, ask=True), self._left)

    def answer(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text of the answer `ids` to a prompt.

        If the template writes spaces before an answer, these spaces are removed from the text.
        """
        answer = self.text.behind(prompt, ids)
        if self.template is None:
            return answer
        spaces = len(answer) - len(answer.lstrip(" "))
        return answer[min(self._left + len(self.template.lead), spaces) :]

    @cached_property
    def _left(self) -> int:
        """Return how many of the spaces at the end of a prompt must be left out.

        Many tokenizers encode a space and the next word as one token, such as " word". If the
        prompt ended with spaces, the model could not choose such a token.
        """
        if self.template is None:
            return 0
        asks = self.template.asks
        whole = self.text.marked(f"{asks}{self.template.lead}a")
        for left in range(len(asks) - len(asks.rstrip(" ")) + 1):
            ids = self._without_spaces(asks, left)
            if whole[: len(ids)] == ids:
                return left
        # no number of spaces can be left out without changing the tokens before the spaces
        return 0

    def _without_spaces(self, asks: str, left: int) -> list[int]:
        """Return the token ids of the text `asks`, which the chat template writes before an answer.
        The last `left` characters of this text are left out."""
        return self.text.marked(asks[: len(asks) - left])

    @property
    def around(self) -> int:
        """Return the number of token ids that a prompt has in addition to the ids of the user's
        line. These additional ids come from the prefix of the tokenizer, or from the chat
        template."""
        if self.template is None:
            return len(self.text.prefix)
        return len(self.prompt([""]))
