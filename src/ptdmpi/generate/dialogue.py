"""A conversation as a model's tokens: its chat template, and where an answer begins and ends."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from ptdmpi.data.chat_template import ANSWER, ChatTemplate
from ptdmpi.generate.text import Text, ends_of, find_chat
from ptdmpi.inference.stored import StoredAdapter, StoredModel


@dataclass(frozen=True)
class Dialogue:
    """How a model is asked for its next answer: by its `template`, or, None, by plain lines.
    `ends`: the ids that end an answer."""

    text: Text
    template: ChatTemplate | None
    ends: frozenset[int]

    @classmethod
    def of(cls, stored: StoredModel, text: Text, beside: StoredAdapter | None) -> Self:
        """By the template of the model, or of the adapters `beside` it. Answers end as texts do;
        in a template's words also by the special token that it writes behind an answer, and by
        those that the config.json of a model from Hugging Face names. Raises InputError."""
        template = find_chat(stored, text, beside)
        if template is None:
            return cls(text, None, text.ends)
        turn = template.end_of_turn(text.special)
        ends = () if turn is None else text.marked(turn)
        return cls(text, template, text.ends.union(ends_of(stored), ends))

    def prompt(self, lines: Sequence[str]) -> list[int]:
        """The ids of lines and answers in turn, and of what asks for the next answer."""
        if self.template is None:
            return self.text.prompt("".join(one.removesuffix("\n") + "\n" for one in lines))
        said = zip(itertools.cycle(("user", ANSWER)), lines, strict=False)
        messages = [{"role": role, "content": content} for role, content in said]
        return self._without_spaces(self.template.render(messages, ask=True), self._left)

    def answer(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """What was written behind a prompt, as the next one has it among its lines: without the
        spaces in front that the template writes itself."""
        found = self.text.behind(prompt, ids)
        own = 0 if self.template is None else self._left + len(self.template.lead)
        return found[min(own, len(found) - len(found.lstrip(" "))) :]

    @cached_property
    def _left(self) -> int:
        """How many of the spaces that end what asks for an answer are no token of their own once
        there is one (a word, say), but the beginning of its first: a prompt goes without them."""
        if self.template is None:
            return 0
        asks = self.template.asks
        whole = self.text.marked(f"{asks}{self.template.lead}a")
        for left in range(len(asks) - len(asks.rstrip(" ")) + 1):
            ids = self._without_spaces(asks, left)
            if whole[: len(ids)] == ids:
                return left
        return 0  # where even other tokens change

    def _without_spaces(self, asks: str, left: int) -> list[int]:
        return self.text.marked(asks[: len(asks) - left])

    @property
    def around(self) -> int:
        """How many ids stand around a line that has none."""
        return len(self.text.prefix if self.template is None else self.prompt([""]))
