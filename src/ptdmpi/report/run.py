"""The content of a run directory: configuration, records, measured timeline and attempts."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ptdmpi.base.disk import read_file
from ptdmpi.base.toml import tables_of
from ptdmpi.config import InputError
from ptdmpi.lineage.attempts import HISTORY, unreadable_lines
from ptdmpi.plan.schedule.simulate import Timeline
from ptdmpi.report import trained
from ptdmpi.report.sound import LineCount, has_sound_values, unreadable

METRICS = "metrics.jsonl"
# the keys that every record of a training step must have
STEP = {"loss", "layout", "rank_count", "tokens"}
# keys of the record of a validation: the loss, and either a perplexity (for text) or an accuracy
# (for a classification)
VALIDATION = ("validation_loss", "validation_perplexity", "validation_accuracy")


@dataclass(frozen=True)
class RecordedRun:
    """The contents of a run directory.

    `config` is the configuration with which the last recorded step was trained. `measured` is the
    newest measured timeline of a step, or None. `measured_config` is the configuration with which
    this step was trained. `records` are all records in `metrics.jsonl`, oldest first. `steps`,
    `validations` and `tasks` are the records of steps, of validations and of evaluations of tasks.
    `attempts` are the attempts that trained the recorded steps. `problems` has a text for each file
    with unreadable lines, and for each unreadable timeline.
    """

    path: Path
    config: dict[str, Any]
    records: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    tasks: list[dict[str, Any]]
    measured: Timeline | None
    measured_config: dict[str, Any]
    attempts: list[trained.TrainedSteps]
    problems: list[str]


def read(path: Path) -> RecordedRun:
    """Read the run in the directory `path`, and return its contents. Raise InputError if `path` is
    not a run directory."""
    try:
        config = tables_of(read_file(path / "config.toml"))
        content = read_file(path / METRICS)
    except OSError as error:
        raise InputError(
            f"{path} is not a run directory: {Path(error.filename).name}: {error.strerror}"
        ) from None
    except ValueError as error:
        raise InputError(f"{path}: config.toml is damaged: {error}") from None
    lines = [line.decode(errors="replace") for line in content.splitlines()]
    # the last line is incomplete if a crash has truncated it, or if it is being written now
    whole = len(lines) if content.endswith(b"\n") else len(lines) - 1
    count = LineCount(METRICS)
    valid = [*records(lines[:whole], count), *records(lines[whole:], LineCount(METRICS))]
    return recorded(path, config, valid, count.problems())


def recorded(
    path: Path,
    config: dict[str, Any],
    records: list[dict[str, Any]],
    problems: Sequence[str] = (),
) -> RecordedRun:
    """Return the run in the directory `path`. `config` is the content of its `config.toml`,
    `records` are the records in its `metrics.jsonl`, and `problems` are texts about unreadable
    lines in this file. Raise InputError if the history is a file that cannot be opened."""
    steps = [record for record in records if record.keys() >= STEP]
    attempts = trained.trained_steps(path, steps)
    lines = unreadable_lines(path)
    measured = _measured(path / "timeline")
    return RecordedRun(
        path=path,
        config=trained.config_at(attempts, None, config),
        records=records,
        steps=steps,
        validations=[record for record in records if VALIDATION[0] in record],
        tasks=[record for record in records if "tasks" in record],
        measured=measured.timeline,
        measured_config=trained.config_at(attempts, measured.step, config),
        attempts=attempts,
        problems=[
            *problems,
            *unreadable(HISTORY, len(lines), min(lines, default=0)),
            *measured.problems,
        ],
    )


class _Measured(NamedTuple):
    """The newest readable timeline of a run, and the number of its step. Both are None if no
    timeline is readable. `problems` has a text for each timeline that is newer but cannot be
    read."""

    timeline: Timeline | None
    step: int | None
    problems: list[str]


def _measured(folder: Path) -> _Measured:
    """Return the newest readable timeline in a folder, as a `_Measured`."""
    problems: list[str] = []
    for path in sorted(folder.glob("step-*.json"), reverse=True):
        try:
            timeline = Timeline.from_json(read_file(path).decode())
            return _Measured(timeline, int(path.stem.removeprefix("step-")), problems)
        except OSError as error:
            reason = str(error.strerror)
        except (InputError, ValueError) as error:
            reason = str(error)
        problems.append(f"{path.relative_to(folder.parent)}: {reason}")
    return _Measured(None, None, problems)


def records(lines: Iterable[str], count: LineCount) -> Iterator[dict[str, Any]]:
    """Yield the valid records in `lines`. Lines that a crash has truncated or an editor has damaged
    are skipped. `count` counts all lines and the skipped lines."""
    for line in lines:
        record = _record(line)
        count.add(line, record is not None)
        if record is not None:
            yield record


def _record(line: str) -> dict[str, Any] | None:
    """Return the record in a line; None if the line is not a valid record."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and _is_sound(record):
            return record
    return None


def _is_sound(record: dict[str, Any]) -> bool:
    """Return True if the record has a step, all necessary keys, and values that the report can
    show. The record of a step must have the keys in STEP. The record of a validation must have a
    perplexity or an accuracy."""
    if type(record.get("step")) is not int or not has_sound_values(record):
        return False
    if "loss" in record and not record.keys() >= STEP:
        return False
    return VALIDATION[0] not in record or any(key in record for key in VALIDATION[1:])
