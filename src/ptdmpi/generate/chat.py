"""A conversation on the terminal: line by line, each behind all that was said before."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from ptdmpi.config import InputError, SharedInputError
from ptdmpi.generate.dialogue import Dialogue
from ptdmpi.generate.generator import Prompt, generate
from ptdmpi.generate.write import MAX_NEW_TOKENS, Writer
from ptdmpi.inference.stored import open_adapter
from ptdmpi.terminal.say import note

SIGN = "> "
QUIT = "/quit"
TORN = "\ufffd"  # what a character of several tokens is decoded to while some are missing


class Chat:
    """Keeps what was said, and answers. Every rank has one.

    The text so far is that of all lines and answers, as the model's chat template writes them, or
    each ended by a newline; where it leaves no room for an answer, the oldest lines and answers
    fall out of sight, and of a line that is too long by itself its beginning.
    """

    def __init__(self, writer: Writer, out: TextIO | None = None) -> None:
        """`out`: where answers are written as they arise; stdout. Raises InputError on every
        rank."""
        self.writer, self.out = writer, out or sys.stdout
        self.said: list[str] = []
        self.answers = 0
        self._shown = ""
        # found by rank 0 first, whose mistake is everybody's
        writer.world.on_root(lambda: _dialogue(writer) and None)
        self.dialogue = _dialogue(writer)
        most = writer.model.seq_length - self.dialogue.around - 1
        if not 1 <= self._room <= most:
            raise SharedInputError(
                f"--max-new-tokens {self._room} in a conversation; legal: 1 to {most}, for the "
                f"model has seq_length = {writer.model.seq_length}"
            )

    def talk(self, read: Callable[[], str | None]) -> str:
        """Answer every line that rank 0's `read` gives (None: no more); returns why it ended. On
        one rank Ctrl-C ends it at any moment; of several ranks only while rank 0 reads."""
        world = self.writer.world
        try:
            while True:
                line, why = world.on_root(lambda: _asked(read))
                if line is None:
                    return str(why)
                try:
                    self._require(line)
                except InputError as error:  # the same on all ranks
                    note(f"ptdmpi generate: {error}")
                    continue
                self.answer(line)
        except KeyboardInterrupt:
            if world.size > 1:
                raise
            return "Ctrl-C"

    def answer(self, line: str) -> str:
        """What the model writes behind `line` and all that was said before, printed as it arises by
        the one rank that decides."""
        writer = self.writer
        ids = self._within(line)
        self._shown = ""

        def show(new: list[int]) -> bool:
            self._show(self.dialogue.answer(ids, new))
            return False

        prompt = Prompt(ids, self._room, self.answers, show)
        (found,) = generate(writer.model, [prompt], writer.sampling, self.dialogue.ends)
        written = self.dialogue.answer(ids, found.ids)
        if writer.model.decides and writer.model.axes["data"].rank == 0:
            self._show(written + ("" if written.endswith("\n") else "\n"), whole=True)
        self.said += [line, written]
        self.answers += 1
        return written

    @property
    def _room(self) -> int:
        """How many tokens an answer may have: as asked, by itself at most half of `seq_length`."""
        length = self.writer.model.seq_length
        asked: int | None = self.writer.options["max_new_tokens"]
        return min(MAX_NEW_TOKENS, max(1, length // 2)) if asked is None else asked

    def _require(self, line: str) -> None:
        """Raises InputError for a line that cannot be said."""
        text = self.writer.text
        text.encode(line)
        special = () if self.dialogue.template is None else text.special
        if named := sorted(one for one in special if one in line):
            raise InputError(
                f"the line has the text {named[0]}, which the chat template would make a special "
                "token of"
            )

    def _within(self, line: str) -> list[int]:
        """The ids of the text so far with `line`, as many as leave room for the answer."""
        text = self.writer.text
        most = self.writer.model.seq_length - self._room
        while len(ids := self.dialogue.prompt([*self.said, line])) > most:
            if self.said:
                del self.said[:2]
                note("ptdmpi generate: the oldest line and its answer are out of sight now")
            elif self.dialogue.template is None:
                kept = most - len(text.prefix)
                return [*text.prefix, *ids[len(ids) - kept :]]
            else:
                line = text.decode(text.encode(line)[len(ids) - most :]).lstrip(TORN)
        return ids

    def _show(self, written: str, whole: bool = False) -> None:
        """Print what is new in an answer; a character that is not whole yet waits."""
        if (whole or not written.endswith(TORN)) and written.startswith(self._shown):
            self.out.write(written[len(self._shown) :])
            self.out.flush()
            self._shown = written


def _dialogue(writer: Writer) -> Dialogue:
    """How the writer's model, with its adapters, is asked. Raises InputError."""
    adapter: Path | None = writer.options["adapter"]
    beside = None if adapter is None else open_adapter(adapter)
    return Dialogue.of(writer.stored, writer.text, beside)


def _asked(read: Callable[[], str | None]) -> tuple[str | None, str]:
    """Rank 0's next line, or None and why there is none."""
    try:
        line = read()
        # Open MPI's mpirun never hands the end of input on: a word has to do there
        return (None, QUIT) if line == QUIT else (line, "end of input")
    except KeyboardInterrupt:
        return None, "Ctrl-C"


def read_line() -> str | None:
    """A line of standard input, with a sign before it on a terminal; None at its end."""
    if sys.stdin.isatty():
        sys.stdout.write(SIGN)
        sys.stdout.flush()
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None
