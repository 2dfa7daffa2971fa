"""From prompts as text to continuations as text."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.generate.generator import Prompt, check, generate
from ptdmpi.generate.prompts import Given, read_prompts
from ptdmpi.generate.sampling import Sampling
from ptdmpi.generate.text import Text, find_text
from ptdmpi.inference.model import InferenceModel, open_inference
from ptdmpi.inference.stored import StoredModel, kind_of
from ptdmpi.terminal.progress import progress

MAX_NEW_TOKENS = 100


def write(run: Path, world: World, **options: Any) -> list[dict[str, Any]]:
    """`samples` continuations of each of the `prompts`, on rank 0; every rank calls it.

    `options` are those of `ptdmpi generate`. Raises InputError on every rank.
    """
    writer = Writer(run, world, options)
    given = [Given(text) for text in options["prompts"] or ("",)]
    return writer.continuations(given, world.on_root(lambda: writer.prepare(given)))


def write_file(run: Path, world: World, **options: Any) -> Iterator[str]:
    """The same for the file `options["from_file"]`, as lines of JSON in its order, each on rank 0
    as soon as it is there: every rank goes through it. All prompts are checked before the first one
    is continued."""
    given = world.on_root(lambda: read_prompts(options["from_file"]))
    writer = Writer(run, world, options)
    prompts = world.on_root(lambda: writer.prepare(given))
    samples = options["samples"]
    at_once = max(1, options["batch"] * writer.model.axes["data"].size // samples)
    # on one terminal a bar and the lines would write over each other
    bar = progress("generating", len(given), "prompt")
    with nullcontext(_silent) if sys.stdout.isatty() else bar as advance:
        for first in range(0, len(given), at_once):
            some = given[first : first + at_once]
            ready = prompts[first * samples : (first + len(some)) * samples]
            for one in writer.continuations(some, ready):
                yield json.dumps(one)
            advance(len(some))


def _silent(more: float) -> None:
    """Progress that nobody is to see."""


class Writer:
    """A model with its tokenizer, asked by texts. Every rank has one and calls all methods but
    `prepare`, which is rank 0's. Raises InputError on every rank."""

    text: Text

    def __init__(self, run: Path, world: World, options: Mapping[str, Any]) -> None:
        """`options` are those of `ptdmpi generate`."""
        chosen = {key: options[key] for key in ("temperature", "top_k", "top_p", "seed")}
        self.world, self.options = world, options
        self.sampling = world.on_root(lambda: Sampling(**chosen))
        kind = kind_of(options["ema"])
        how = options["layout"], options["precision"], False, options["adapter"], kind
        opened = open_inference(run, world, *how)
        self.model: InferenceModel = opened[0]
        self.stored: StoredModel = opened[1]
        # found by rank 0 first, whose mistake is everybody's
        world.on_root(lambda: find_text(self.stored, options["tokenizer"]) and None)
        self.text = find_text(self.stored, options["tokenizer"])

    def prepare(self, given: Sequence[Given]) -> list[Prompt]:
        """The prompts of `samples` continuations of each. Raises InputError."""
        prompts: list[Prompt] = []
        for one in given:
            try:
                ids = self.text.prompt(one.text)
                length = self.length(ids)
                check(Prompt(ids, length), self.model)
            except InputError as error:
                raise InputError(f"{one.place}: {error}" if one.place else str(error)) from None
            first = len(prompts)
            prompts += [Prompt(ids, length, first + k) for k in range(self.options["samples"])]
        return prompts

    def length(self, ids: Sequence[int]) -> int:
        """How many new tokens are asked for behind these."""
        asked: int | None = self.options["max_new_tokens"]
        if asked is not None:
            return asked
        return max(1, min(MAX_NEW_TOKENS, self.model.seq_length - len(ids)))

    def continuations(
        self, given: Sequence[Given], prompts: Sequence[Prompt]
    ) -> list[dict[str, Any]]:
        """What is written behind each of `prompts`, as `prepare` made them of `given`; on rank 0,
        nothing on others."""
        ends = self.text.ends
        found = generate(self.model, prompts, self.sampling, ends, rows=self.options["batch"])
        if self.world.rank:
            return []
        return [
            {
                **given[place // self.options["samples"]].fields,
                "prompt": given[place // self.options["samples"]].text,
                "text": self.text.behind(prompt.ids, one.ids),
                "prompt_tokens": len(prompt.ids),
                "ids": one.ids,
                "reason": one.reason,
            }
            for place, (prompt, one) in enumerate(zip(prompts, found, strict=True))
        ]
