"""Conversations with a model on the terminal: the model answers each line of the user."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from ptdmpi.base.say import note
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.generate.dialogue import Dialogue
from ptdmpi.generate.generator import Prompt, generate
from ptdmpi.generate.write import MAX_NEW_TOKENS, Writer
from ptdmpi.inference.stored import open_adapter

SIGN = "> "
QUIT = "/quit"
TORN = "\ufffd"  # decoding returns this character in place of an incomplete character


class Chat:
    """A conversation: the user's lines and the model's answers so far. Every rank has the same
    conversation.

    The model reads the whole conversation, in the format of the model's chat template. Without a
    template, each line and each answer ends with a newline. If a conversation is so long that no
    room is left for an answer, the oldest line and its answer are dropped. If a single line is too
    long, its beginning is cut off.
    """

    def __init__(self, writer: Writer, out: TextIO | None = None) -> None:
        """Begin an empty conversation. Answers are written to `out` token by token; None means
        stdout.

        Raise InputError on every rank if the chat template cannot be used, or if the option
        `max_new_tokens` leaves no room for a line.
        """
        self.writer = writer
        self.out = out or sys.stdout
        self.said: list[str] = []
        self.answers = 0
        self._shown = ""
        # `_dialogue` runs on rank 0 first, so that its InputError is raised on every rank
        writer.world.on_root(lambda: _dialogue(writer) and None)
        self.dialogue = _dialogue(writer)
        most = writer.model.seq_length - self.dialogue.around - 1
        if not 1 <= self._room <= most:
            raise SharedInputError(
                f"--max-new-tokens {self._room} in a conversation; legal: 1 to {most}, for the "
                f"model has seq_length = {writer.model.seq_length}"
            )

    def talk(self, read: Callable[[], str | None]) -> str:
        """Answer every line that `read` returns on rank 0, until it returns None. Return the reason
        why the conversation ended.

        On one rank Ctrl-C ends the conversation at any time. On several ranks, Ctrl-C ends the
        conversation only while rank 0 waits for a line.
        """
        world = self.writer.world
        try:
            while True:
                line, why = world.on_root(lambda: _asked(read))
                if line is None:
                    return str(why)
                try:
                    self._require(line)
                except InputError as error:  # `_require` raises the same error on all ranks
                    note(f"ptdmpi generate: {error}")
                    continue
                self.answer(line)
        except KeyboardInterrupt:
            if world.size > 1:
                raise
            return "Ctrl-C"

    def answer(self, line: str) -> str:
        """Return the model's answer to `line`. The rank that samples the tokens prints each token
        as soon as it is sampled."""
        writer = self.writer
        ids = self._within(line)
        self._shown = ""

        def show(new: list[int]) -> bool:
            """Print the text of the new ids, and return False, so that the answer continues."""
            self._show(self.dialogue.answer(ids, new))
            return False

        prompt = Prompt(ids, self._room, self.answers, show)
        (continuation,) = generate(writer.model, [prompt], writer.sampling, self.dialogue.ends)
        written = self.dialogue.answer(ids, continuation.ids)
        if writer.model.decides and writer.model.axes["data"].rank == 0:
            self._show(written.removesuffix("\n") + "\n", whole=True)
        self.said += [line, written]
        self.answers += 1
        return written

    @property
    def _room(self) -> int:
        """Return the maximum number of tokens of an answer. This is the option `max_new_tokens`, or
        by default the smaller of two numbers: MAX_NEW_TOKENS, and half of `seq_length`."""
        asked: int | None = self.writer.options["max_new_tokens"]
        if asked is not None:
            return asked
        return min(MAX_NEW_TOKENS, max(1, self.writer.model.seq_length // 2))

    def _require(self, line: str) -> None:
        """Raise InputError for a line that is not UTF-8, or that contains the name of a special
        token."""
        text = self.writer.text
        text.encode(line)
        if self.dialogue.template is None:
            return
        named = sorted(name for name in text.special if name in line)
        if named:
            raise InputError(
                f"the line has the text {named[0]}, which the chat template would turn into a "
                "special token"
            )

    def _within(self, line: str) -> list[int]:
        """Return the token ids of the conversation up to and including `line`. The conversation is
        shortened if it leaves no room for an answer."""
        text = self.writer.text
        most = self.writer.model.seq_length - self._room
        while len(ids := self.dialogue.prompt([*self.said, line])) > most:
            if self.said:
                del self.said[:2]
                note("ptdmpi generate: the oldest line and its answer are dropped")
            elif self.dialogue.template is None:
                kept = most - len(text.prefix)
                return [*text.prefix, *ids[len(ids) - kept :]]
            else:
                line = text.decode(text.encode(line)[len(ids) - most :]).lstrip(TORN)
        return ids

    def _show(self, written: str, whole: bool = False) -> None:
        """Print the new part of an answer. If the last character is incomplete, it is printed
        later, when its last token has arrived."""
        if (whole or not written.endswith(TORN)) and written.startswith(self._shown):
            self.out.write(written[len(self._shown) :])
            self.out.flush()
            self._shown = written


def _dialogue(writer: Writer) -> Dialogue:
    """Return the `Dialogue` for the model of `writer` and its adapters. Raise InputError if the
    adapters or the chat template cannot be used.
    """
    path: Path | None = writer.options["adapter"]
    adapter = None
    if path is not None:
        adapter = open_adapter(path)
    return Dialogue.of(writer.stored, writer.text, adapter)


def _asked(read: Callable[[], str | None]) -> tuple[str | None, str]:
    """Return two values. The first value is the next line of the user, or None at the end of the
    conversation. The second value is the reason why the conversation ends; it has no meaning while
    the first value is a line. Only rank 0 calls this function."""
    try:
        line = read()
        # Under Open MPI's mpirun, the program does not notice the end of input (Ctrl-D). So the
        # line QUIT also ends the conversation.
        if line == QUIT:
            return None, QUIT
        return line, "end of input"
    except KeyboardInterrupt:
        return None, "Ctrl-C"


def read_line() -> str | None:
    """Return a line of standard input, or None at its end. On a terminal, print a prompt sign
    first."""
    if sys.stdin.isatty():
        sys.stdout.write(SIGN)
        sys.stdout.flush()
    line = sys.stdin.readline()
    if not line:
        return None
    return line.removesuffix("\n")
