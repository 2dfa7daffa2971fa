"""A conversation as a model's tokens: its chat template, and what ends an answer."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
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
        return self.text.marked(self.template.render(messages, ask=True))

    @property
    def around(self) -> int:
        """How many ids stand around a line that has none."""
        return len(self.text.prefix if self.template is None else self.prompt([""]))
