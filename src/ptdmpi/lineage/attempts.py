"""The history of a run's attempts. It records with which configuration, layout and data each step
was trained, and why each attempt ended.

An attempt is one start of the training program. An attempt appends one line to `history.jsonl` in
the run directory when its training begins, and one line when the attempt ends. If an attempt was
killed, its second line is missing, and its last step is known only from `metrics.jsonl`.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ptdmpi.base.disk import open_file, read_file

HISTORY = "history.jsonl"


@dataclass(frozen=True)
class PastAttempt:
    """An earlier attempt, which trained steps `first` + 1 to `last` of a run. If the attempt was
    killed, its end is unknown and `last` is None. `began` and `ended` are times in ISO format.
    `how` describes the state from which the attempt began, and `why` is the reason for its end;
    `ended` and `why` are empty if the end is unknown. `config` is the complete configuration, and
    `changed` lists its differences from the configuration of the previous attempt. `trained_on` is
    the result of `TrainedOn.as_json`: plain JSON, so that a program can read the history without
    importing the modules for data."""

    number: int
    began: str
    how: str
    first: int
    ranks: int
    layout: str
    changed: tuple[str, ...]
    trained_on: Mapping[str, Any]
    config: Mapping[str, Any]
    last: int | None = None
    ended: str = ""
    why: str = ""


class History:
    """The writer of the history file in a run directory, for one attempt. All methods raise OSError
    if the history file cannot be read or written."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / HISTORY
        self.number = 0  # the number of the present attempt

    def begin(self, **values: Any) -> None:
        """Record the beginning of an attempt. The keyword arguments are these fields of
        `PastAttempt`: `how`, `first`, `ranks`, `layout`, `changed`, `trained_on` (as JSON) and
        `config`."""
        self.number = 1 + max((line["attempt"] for line in _lines(self.path)), default=0)
        self._append({"attempt": self.number, "event": "begin", "time": _now(), **values})

    def end(self, last: int, why: str) -> None:
        """Record the last step of the attempt and the reason for its end. Do nothing if no attempt
        has begun, or if the end is already recorded."""
        if self.number:
            line = {"attempt": self.number, "event": "end", "time": _now()}
            self._append({**line, "last": last, "why": why})
            self.number = 0

    def _append(self, values: Mapping[str, Any]) -> None:
        with open_file(self.path, "ab") as file:
            # if a crash has left an incomplete last line, end that line first
            torn = file.tell() and not _ends_line(self.path)
            file.write((b"\n" if torn else b"") + json.dumps(values).encode() + b"\n")


def attempts(directory: Path) -> list[PastAttempt]:
    """Return the attempts (starts of the training program) that a run directory records, oldest
    first. The list is empty if the run was trained by an older version of this program, which wrote
    no history. Incomplete lines are skipped. Raises OSError if the file cannot be read."""
    begun: dict[int, dict[str, Any]] = {}
    for line in _lines(directory / HISTORY):
        event = line.get("event")
        number = line["attempt"]
        if event == "begin":
            begun[number] = line
        elif event == "end" and number in begun:
            end = {"last": line.get("last"), "why": line.get("why", "")}
            begun[number] = {**begun[number], **end, "ended": line.get("time", "")}
    past = map(_attempt, begun.values())
    return [attempt for attempt in past if attempt is not None]


def unreadable_lines(directory: Path) -> list[int]:
    """Return the numbers of the lines in a run directory's history that cannot be read, counted
    from 1. An incomplete last line, which a crash may leave, is left out, and so are empty lines.
    Raises OSError if the file cannot be read."""
    path = directory / HISTORY
    if not path.exists():
        return []
    content = read_file(path)
    whole = content[: content.rfind(b"\n") + 1]
    numbers = []
    for number, text in enumerate(whole.splitlines(), 1):
        line = _line(text)
        if line is None or (line.get("event") == "begin" and _attempt(line) is None):
            numbers += [number] if text.strip() else []
    return numbers


def _attempt(line: Mapping[str, Any]) -> PastAttempt | None:
    with contextlib.suppress(KeyError, ValueError, TypeError):
        return PastAttempt(
            number=line["attempt"],
            began=line["time"],
            how=line["how"],
            first=line["first"],
            ranks=line["ranks"],
            layout=line["layout"],
            changed=tuple(line["changed"]),
            trained_on=line["trained_on"],
            config=line["config"],
            last=line.get("last"),
            ended=line.get("ended", ""),
            why=line.get("why", ""),
        )
    return None


class AttemptedSteps(NamedTuple):
    """The steps `first` to `last`, which the attempt `attempt` (one start of the training program)
    trained."""

    attempt: PastAttempt
    first: int
    last: int


def that_trained(all_attempts: Sequence[PastAttempt], steps: Iterable[int]) -> list[AttemptedSteps]:
    """Return the attempts (starts of the training program) that trained the recorded `steps`,
    sorted from the oldest to the newest attempt. Each returned item has the first and the last of
    the `steps` that its attempt trained. If several attempts may have trained a step, the newest of
    them counts. Steps that no attempt trained are left out."""
    owed: dict[int, list[int]] = {}
    for step in steps:
        mine = [
            place
            for place, attempt in enumerate(all_attempts)
            if attempt.first < step and (attempt.last is None or step <= attempt.last)
        ]
        if mine:
            owed.setdefault(mine[-1], []).append(step)
    return [
        AttemptedSteps(all_attempts[place], min(own), max(own))
        for place, own in sorted(owed.items())
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a history file as JSON objects. Lines are skipped if they are not JSON or
    have no attempt number."""
    try:
        content = read_file(path)
    except FileNotFoundError:
        return []
    lines = map(_line, content.splitlines())
    return [line for line in lines if line is not None]


def _line(text: bytes) -> dict[str, Any] | None:
    """Return a line of a history file as a JSON object; None if it is not JSON or has no attempt
    number."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        if isinstance(value, dict) and isinstance(value.get("attempt"), int):
            return value
    return None


def _ends_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _now() -> str:
    """Return the local time, or UTC if the environment variable TZ names no legal time zone."""
    try:
        now = datetime.now().astimezone()
    except ValueError:  # TZ has an offset of a day or more from UTC
        now = datetime.now(UTC)
    return now.isoformat(timespec="seconds")
