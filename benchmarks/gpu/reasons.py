"""Reasons why a part or a row was not measured, and a test whether the next run can measure it."""

from collections.abc import Mapping
from typing import Any

# name of the file, in the folder of results, that has all measurements so far
LATEST = "latest.json"
# a part or a row that was not measured has one of these keys; the value is the reason
WORDS = ("skipped", "left", "failed")


class Skipped(Exception):
    """An error for a part or a row that this machine cannot measure. The text of the error gives
    the reason."""


class Left(Skipped):
    """An error for a part or a row that was not measured now, but that the next run may measure."""


def _rows(part: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: row for name, row in part.items() if isinstance(row, dict)}


def done(part: Mapping[str, Any]) -> bool:
    """Return True if no row of a part remains to be measured.

    A row is done if it has numbers, or if it was skipped for a reason that stays the same on this
    device with this commit and these libraries. A part that has no rows yet is not done.
    """
    rows = [part, *_rows(part).values()]
    return bool(part) and not any({"left", "failed"} & row.keys() for row in rows)


def reasons(part: Mapping[str, Any]) -> dict[str, str]:
    """Return the reason for each row that was not measured. The reason for the complete part has
    the key ""."""
    rows = {"": part, **_rows(part)}
    return {name: row[word] for name, row in rows.items() for word in WORDS if word in row}


def why_not(error: Exception) -> dict[str, str]:
    """Return the record for a part or a row whose measurement raised an exception."""
    if isinstance(error, Left):
        return {"left": str(error)}
    if isinstance(error, Skipped):
        return {"skipped": str(error)}
    first_line = str(error).partition("\n")[0]
    return {"failed": f"{type(error).__name__}: {first_line}"}
