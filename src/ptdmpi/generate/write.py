"""Continuing prompts and returning the results as texts."""

import copy
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ptdmpi.base.progress import progress
from ptdmpi.comm.world import World
from ptdmpi.config import InputError
from ptdmpi.generate.generator import Prompt, check, generate
from ptdmpi.generate.prompts import Given, read_prompts
from ptdmpi.generate.sampling import Sampling
from ptdmpi.inference.model import InferenceModel, open_inference
from ptdmpi.inference.stored import StoredModel, kind_of
from ptdmpi.inference.text import Text, find_text

MAX_NEW_TOKENS = 100
# the options that a user can change without loading the model again
CHANGEABLE = {"batch", "max_new_tokens", "samples", "seed", "temperature", "top_k", "top_p"}


def write(run: Path, world: World, **options: Any) -> list[dict[str, Any]]:
    """Return `samples` continuations of each prompt on rank 0, and an empty list on other ranks.

    Every rank calls this function. `options` are the options of `ptdmpi generate`. If the model or
    a prompt cannot be used, raise InputError on every rank.
    """
    writer = Writer(run, world, options)
    given = [Given(text) for text in options["prompts"] or ("",)]
    prompts = world.on_root(lambda: writer.prepare(given))
    return writer.continuations(given, prompts)


def write_file(run: Path, world: World, **options: Any) -> Iterator[str]:
    """Yield the continuations of the prompts in `options["from_file"]`, as lines of JSON.

    Rank 0 yields each line as soon as it is complete, in the order of the file. Every rank must
    iterate over the result, although only rank 0 yields lines. All prompts are checked before the
    first one is continued. If the model or a prompt cannot be used, raise InputError on every rank.
    """
    given = world.on_root(lambda: read_prompts(options["from_file"]))
    writer = Writer(run, world, options)
    prompts = world.on_root(lambda: writer.prepare(given))
    samples = options["samples"]
    at_once = max(1, options["batch"] * writer.model.axes["data"].size // samples)
    # display no bar if the lines go to a terminal, because the bar and the lines would overwrite
    # each other
    bar = progress("generating", len(given), "prompt")
    with nullcontext(_silent) if sys.stdout.isatty() else bar as advance:
        for first in range(0, len(given), at_once):
            batch = given[first : first + at_once]
            ready = prompts[first * samples : (first + len(batch)) * samples]
            for record in writer.continuations(batch, ready):
                yield json.dumps(record)
            advance(len(batch))


def _silent(more: float) -> None:
    """Do nothing. `write_file` calls this function in place of a progress bar's `advance` if no bar
    is displayed."""


class Writer:
    """A model with its tokenizer, which continues texts.

    Every rank has a writer, and calls all methods except `prepare`, which only rank 0 calls. If a
    method raises InputError, all ranks raise it.
    """

    text: Text

    def __init__(self, run: Path, world: World, options: Mapping[str, Any]) -> None:
        """Load the model at `run`; `options` are the options of `ptdmpi generate`."""
        self.world = world
        self.options = options
        self.sampling = world.on_root(self._sampling)
        self.model: InferenceModel
        self.stored: StoredModel
        self.model, self.stored = open_inference(
            run,
            world,
            options["layout"],
            options["precision"],
            adapter=options["adapter"],
            kind=kind_of(options["ema"]),
        )
        # `find_text` runs on rank 0 first, so that its InputError is raised on every rank
        world.on_root(lambda: find_text(self.stored, options["tokenizer"]) and None)
        self.text = find_text(self.stored, options["tokenizer"])

    def _sampling(self) -> Sampling:
        names = ("temperature", "top_k", "top_p", "seed")
        return Sampling(**{name: self.options[name] for name in names})

    def changed(self, **options: Any) -> "Writer":
        """Return a writer for the same model with other options for its continuations. Raise
        InputError for an illegal value, and TypeError for an option that cannot be changed."""
        unknown = sorted(options.keys() - CHANGEABLE)
        if unknown:
            raise TypeError(
                f"no option {', '.join(unknown)}; legal: {', '.join(sorted(CHANGEABLE))}"
            )
        writer = copy.copy(self)
        writer.options = {**self.options, **options}
        writer.sampling = self.world.on_root(writer._sampling)
        return writer

    def prepare(self, given: Sequence[Given]) -> list[Prompt]:
        """Return the prompts for `samples` continuations of each text. Raise InputError for a text
        that the model cannot continue."""
        prompts: list[Prompt] = []
        for text in given:
            try:
                ids = self.text.prompt(text.text)
                length = self.length(ids)
                check(Prompt(ids, length), self.model)
            except InputError as error:
                place = f"{text.place}: " if text.place else ""
                raise InputError(f"{place}{error}") from None
            first = len(prompts)
            prompts += [Prompt(ids, length, first + k) for k in range(self.options["samples"])]
        return prompts

    def length(self, ids: Sequence[int]) -> int:
        """Return the number of new tokens to generate after the prompt `ids`."""
        asked: int | None = self.options["max_new_tokens"]
        if asked is not None:
            return asked
        return max(1, min(MAX_NEW_TOKENS, self.model.seq_length - len(ids)))

    def continuations(
        self, given: Sequence[Given], prompts: Sequence[Prompt]
    ) -> list[dict[str, Any]]:
        """Return a record of each continuation on rank 0, and an empty list on other ranks.

        `prompts` is the list that `prepare(given)` has returned.
        """
        written = generate(
            self.model, prompts, self.sampling, self.text.ends, rows=self.options["batch"]
        )
        if self.world.rank:
            return []
        records = []
        for number, (prompt, new) in enumerate(zip(prompts, written, strict=True)):
            text = given[number // self.options["samples"]]
            records.append(
                {
                    **text.fields,
                    "prompt": text.text,
                    "text": self.text.behind(prompt.ids, new.ids),
                    "prompt_tokens": len(prompt.ids),
                    "ids": new.ids,
                    "reason": new.reason,
                }
            )
        return records
