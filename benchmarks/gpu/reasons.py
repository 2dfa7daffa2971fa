"""What was not measured and why, and whether it will be the next time."""

from collections.abc import Mapping
from typing import Any

LATEST = "latest.json"  # in the folder of results: what was measured so far
WORDS = ("skipped", "left", "failed")


class Skipped(Exception):
    """A part, or a row of it, that this machine does not measure; the text says why."""


class Left(Skipped):
    """One that may be measured the next time."""


def done(found: Mapping[str, Any]) -> bool:
    """Whether nothing of a part is left to be measured: each row is there, or is skipped for a
    reason that stays for as long as device, commit and libraries do."""
    rows = [found, *(one for one in found.values() if isinstance(one, dict))]
    return bool(found) and not any({"left", "failed"} & row.keys() for row in rows)


def reasons(found: Mapping[str, Any]) -> dict[str, str]:
    """Why a part, named "", or rows of it were not measured."""
    rows = {"": found, **{key: one for key, one in found.items() if isinstance(one, dict)}}
    return {key: row[word] for key, row in rows.items() for word in WORDS if word in row}


def why_not(error: Exception) -> dict[str, str]:
    """A part or a row of it that ended with an exception."""
    if isinstance(error, Left):
        return {"left": str(error)}
    if isinstance(error, Skipped):
        return {"skipped": str(error)}
    return {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
