"""Types for the values of command-line options, and options that several commands share."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ptdmpi.base.words import mistake_in_path, printable_line
from ptdmpi.config import InputError
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.config.section import MOST_BATCH


class NamedPath(click.Path):
    """A path that must not be empty, and must not contain control characters or bytes that are not
    UTF-8. Without the first check, `--output "$DIR"` with an unset variable DIR would mean the
    current directory."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the path. Raise click.BadParameter if the path is illegal."""
        if str(value) == "":
            self.fail("it is empty; a path is needed", param, ctx)
        mistake = mistake_in_path(str(value))
        if mistake:
            self.fail(f"{printable_line(str(value))}: {mistake}; rename it", param, ctx)
        return super().convert(value, param, ctx)


class NamedTokenizer(NamedPath):
    """The path of a tokenizer's file, or the name of a tokenizer, such as 'bytes'."""

    name = "text"


class FiniteRange(click.FloatRange):
    """A number in a range. `click.FloatRange` accepts nan, which is neither below nor above any
    limit; this type refuses nan."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the number. Raise click.BadParameter if the number is not in the range."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"nan is not in the range {self._describe_range()}.", param, ctx)
        return number


PATH = NamedPath(path_type=Path)
# The number of continuations of a prompt. It is limited, because a larger number would fill the
# memory.
SAMPLES = click.IntRange(1, 1_000_000)
TOKENIZER = NamedTokenizer()
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
SET = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Set a key; an empty VALUE removes it.",
)
PUSH = click.option(
    "--push",
    metavar="ORG/NAME",
    help="Then upload the files to the Hugging Face hub; a new repository is private.",
)
EMA = click.option("--ema", is_flag=True, help="Use the moving average of the weights.")

_OF_A_TRAINED_MODEL = (
    click.option("--adapter", type=PATH, help="Run or checkpoint of adapters for RUN."),
    click.option(
        "--layout", metavar="t=2,p=2", help="Axis sizes of one model copy [default: the run's]."
    ),
    click.option(
        "--precision",
        type=click.Choice(list(PRECISIONS)),
        help="Type of the computations [default: the run's].",
    ),
    EMA,
    click.option(
        "--tokenizer", type=TOKENIZER, help="'bytes' or a tokenizer.json [default: the shards']."
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs."),
)


def options_of_a_trained_model(function: Callable[..., None]) -> Callable[..., None]:
    """Add options to the command `function`, and return the command. The options are those that all
    commands for trained models share. This function is a decorator."""
    return _with_options(function, _OF_A_TRAINED_MODEL)


def options_of_sampling(temperature: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options by which a command samples tokens. `temperature` is
    the default temperature."""
    options = (
        click.option(
            "--temperature", type=float, default=temperature, show_default=True, help="0: greedy."
        ),
        click.option("--top-k", type=int, help="Sample from the k most likely tokens."),
        click.option(
            "--top-p",
            type=float,
            default=1.0,
            show_default=True,
            help="Sample from the most likely tokens that together have this probability.",
        ),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of the samples."),
    )
    return lambda function: _with_options(function, options)


def _with_options(
    function: Callable[..., None], options: Sequence[Callable[..., Any]]
) -> Callable[..., None]:
    """Return the command `function` with options, which its help shows in this order."""
    for option in reversed(options):
        function = option(function)
    return function


class Number(click.types.FloatParamType):
    """The type of an option whose value is a number. If `least` is None, the value is a finite
    number above 0; otherwise it is an integer from `least` to `most`.

    If `most` is 0, there is no upper limit.
    """

    name = "number"

    def __init__(self, least: int | None = None, most: int = 0) -> None:
        self.least = least
        self.most = most

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Convert the text of the option to a number. Raise InputError if the text is not a legal
        number."""
        try:
            number = float(value) if self.least is None else int(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number) and self._within(number):
            return number
        legal = "a finite number above 0"
        if self.least is not None:
            legal = f"a whole number, {self.least} to {self.most:,}"
        raise InputError(f"{param.opts[0]} {value}: must be {legal}")

    def _within(self, number: float) -> bool:
        if self.most and number > self.most:
            return False
        if self.least is None:
            return number > 0
        return number >= self.least


class NumberList(click.ParamType[list[int]]):
    """The type of an option whose value is a list of positive integers, separated by commas. The
    numbers are sorted, and duplicates are removed.
    """

    name = "sizes"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        """Convert the text of the option to a list of numbers. Raise InputError if the text is not
        such a list.
        """
        parts = str(value).split(",")
        if not all(part.isdigit() and 1 <= int(part) <= MOST_BATCH for part in parts):
            raise InputError(f"{param.opts[0]} {value}: must be numbers from 1, such as 256,512")
        return sorted({int(part) for part in parts})


class ShardGroup(click.ParamType[int | str]):
    """The type of the option --shard-group, which sets the number of data ranks that share one copy
    of the training state. The value is "all", "node" or a number of ranks.
    """

    name = "group"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | str:
        """Convert the text of the option to its value: "all", "node" or a number. Raise InputError
        for any other text.
        """
        if value in ("all", "node"):
            return str(value)
        if not str(value).isdigit() or int(value) < 1:
            raise InputError(f'--shard-group {value}: must be "all", "node" or a number from 1')
        return int(value)
