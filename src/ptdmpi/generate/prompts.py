"""Reading prompts from a file of lines or of JSON objects."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ptdmpi.config import InputError
from ptdmpi.inference.lines import numbered_lines

JSON_LINES = ".jsonl"
PROMPT = "prompt"


@dataclass(frozen=True)
class Given:
    """A prompt that a user has given.

    `fields` are the other fields of the prompt's JSON object. `place` names the file and the line
    of the prompt, for error messages.
    """

    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""


def read_prompts(path: Path) -> list[Given]:
    """Return the prompts in a file, which are its non-blank lines.

    In a file whose name ends in .jsonl, each line is a JSON object with the field "prompt". If a
    line has no valid prompt, raise InputError with the number of the line.
    """
    numbered = numbered_lines(path, "prompt")
    if path.suffix == JSON_LINES:
        return [_of_json(line, place) for place, line in numbered]
    return [Given(line.removesuffix("\r"), place=place) for place, line in numbered]


def _of_json(line: str, place: str) -> Given:
    """Return the prompt in one JSON line. Raise InputError if the line has no valid prompt."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not a JSON line: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get(PROMPT), str):
        raise InputError(f"{place}: no JSON object with a text in the field {PROMPT!r}")
    return Given(values.pop(PROMPT), values, place)
