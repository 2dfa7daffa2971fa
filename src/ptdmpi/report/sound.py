"""Checks of the values in a record of `metrics.jsonl`. The checks are needed because a damaged
record may still be valid JSON."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ptdmpi.base.words import counted
from ptdmpi.train.records.keys import RECORD_KEYS

# a number above this limit counts as damaged
MOST_DRAWN = 1e300
SCORES = ("accuracy", "exact_match")


@dataclass
class LineCount:
    """A count of the lines of a file that were read so far. `lines` is the number of these lines,
    and `unreadable` is the number of unreadable lines. `first` is the line number (counted from 1)
    of the first unreadable line, or 0 if all lines are readable."""

    file: str
    lines: int = 0
    unreadable: int = 0
    first: int = 0

    def add(self, line: str, readable: bool) -> None:
        """Count the next line of the file. An empty line counts as readable."""
        self.lines += 1
        if not readable and line.strip():
            self.unreadable += 1
            self.first = self.first or self.lines

    def problems(self) -> list[str]:
        """Return a list with one text about the unreadable lines. The list is empty if all lines
        are readable."""
        return unreadable(self.file, self.unreadable, self.first)


def unreadable(file: str, count: int, first: int) -> list[str]:
    """Return a list with one text about the `count` unreadable lines of a file. `first` is the
    number of the first unreadable line. The list is empty if `count` is 0."""
    if not count:
        return []
    which = f"line {first}" if count == 1 else f"the first is line {first}"
    return [f"{file}: {counted(count, 'line')} cannot be read: {which}"]


def is_number(value: Any) -> bool:
    """Return True for a number that can be displayed, including NaN and infinities."""
    if isinstance(value, float):
        return not MOST_DRAWN < abs(value) < math.inf
    return type(value) is int and abs(value) <= MOST_DRAWN


def is_drawable(value: Any) -> bool:
    """Return True for a finite number, which can be drawn in a picture."""
    return is_number(value) and math.isfinite(value)


def are_scores(tasks: Any) -> bool:
    """Return True if `tasks` is a table with a score for each task file."""
    if not isinstance(tasks, dict) or not all(
        isinstance(scores, dict) for scores in tasks.values()
    ):
        return False
    for scores in tasks.values():
        numbers = [scores[key] for key in SCORES if key in scores]
        if not numbers or not all(map(is_number, numbers)):
            return False
    return True


def _are_complete_scores(tasks: Any) -> bool:
    """Return True if `tasks` is a table with a score, its standard error and the number of items
    for each task file."""
    keys = ("standard_error", "items")
    return are_scores(tasks) and all(
        is_number(scores.get(key)) for scores in tasks.values() for key in keys
    )


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_number, values))


def _are_counts(values: Any) -> bool:
    return _are_numbers(values) and all(value >= 0 for value in values) and sum(values) > 0


def _are_loads(values: Any) -> bool:
    """Return True if `values` has a list for each layer with the number of tokens of each expert,
    and all layers have equally many experts."""
    return (
        isinstance(values, list)
        and all(map(_are_counts, values))
        and len(set(map(len, values))) == 1
    )


def _is_table_of_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))


def _is_table_of_tables(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_table_of_numbers, value.values()))


def _is_noise(value: Any) -> bool:
    return _is_table_of_numbers(value) and value.keys() >= {"square", "variance", "tokens"}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number_or_none(value: Any) -> bool:
    return value is None or is_number(value)


def _is_anything(value: Any) -> bool:
    return True


# Key of a record -> function that returns True if a value of the key has the right form. All other
# known keys must have a number or None.
_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "bigram_validation_loss": is_number,
    "changed": _is_anything,
    "dead_experts": _are_numbers,
    "epochs": _are_numbers,
    "expert_tokens": _are_loads,
    "fullest_expert": _are_numbers,
    "grad_norm": is_number,
    "gradient_noise": _is_noise,
    "layout": _is_text,
    "loss": is_number,
    "rank_count": is_number,
    "samples_drawn": _are_counts,
    "skipped": _is_anything,
    "slow_ranks": _is_anything,
    "tasks": _are_complete_scores,
    "tokens": is_number,
    "validation_accuracy": is_number,
    "validation_loss": is_number,
    "validation_losses": _is_table_of_numbers,
    "validation_perplexity": is_number,
    "wire_bytes": _is_table_of_tables,
    "wire_messages": _is_table_of_tables,
}


def has_sound_values(record: Mapping[str, Any]) -> bool:
    """Return True if the report can show the values of the record: the values of all keys that this
    version knows must have the right types, and no number may have an impossible value. Values of
    unknown keys are not checked."""
    for key, value in record.items():
        if key in RECORD_KEYS and not _CHECKS.get(key, _is_number_or_none)(value):
            return False
    drawn = record.get("samples_drawn", [])
    return len(drawn) == len(record.get("epochs", drawn))
