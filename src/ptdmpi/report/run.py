"""The content of a run directory: configuration, records, measured timeline and attempts."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptdmpi.base.disk import read_file
from ptdmpi.base.toml import tables_of
from ptdmpi.config import InputError
from ptdmpi.plan.schedule.simulate import Timeline
from ptdmpi.report import trained
from ptdmpi.report.sound import has_sound_values

# the keys that every record of a training step must have
STEP = {"loss", "layout", "rank_count", "tokens"}
# keys of the record of a validation: the loss, and either a perplexity (for text) or an accuracy
# (for a classification)
VALIDATION = ("validation_loss", "validation_perplexity", "validation_accuracy")


@dataclass(frozen=True)
class RecordedRun:
    """The contents of a run directory.

    `config` is the configuration with which the last recorded step was trained. `measured` is the
    newest measured timeline, or None, and `measured_config` is the configuration with which its
    step was trained. `records` are all records in `metrics.jsonl`, oldest first. `steps`,
    `validations` and `tasks` are the records of steps, of validations and of evaluations of tasks.
    `attempts` are the attempts that trained the recorded steps.
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


def read(path: Path) -> RecordedRun:
    """Read the run in the directory `path`, and return its contents. Raise InputError if `path` is
    not a run directory."""
    try:
        config = tables_of(read_file(path / "config.toml"))
        text = read_file(path / "metrics.jsonl").decode(errors="replace")
    except OSError as error:
        raise InputError(
            f"{path} is not a run directory: {Path(error.filename).name}: {error.strerror}"
        ) from None
    except ValueError as error:
        raise InputError(f"{path}: config.toml is damaged: {error}") from None
    return recorded(path, config, list(records(text.splitlines())))


def recorded(path: Path, config: dict[str, Any], records: list[dict[str, Any]]) -> RecordedRun:
    """Return the run in the directory `path`. `config` is the content of its `config.toml`, and
    `records` are the records in its `metrics.jsonl`. Raise InputError if the newest timeline or the
    history cannot be read."""
    steps = [record for record in records if record.keys() >= STEP]
    attempts = trained.trained_steps(path, steps)
    measured = None
    measured_step = None
    timelines = sorted((path / "timeline").glob("step-*.json"))
    if timelines:
        newest = timelines[-1]
        measured = _timeline(newest)
        measured_step = int(newest.stem.removeprefix("step-"))
    return RecordedRun(
        path=path,
        config=trained.config_at(attempts, None, config),
        records=records,
        steps=steps,
        validations=[record for record in records if VALIDATION[0] in record],
        tasks=[record for record in records if "tasks" in record],
        measured=measured,
        measured_config=trained.config_at(attempts, measured_step, config),
        attempts=attempts,
    )


def _timeline(path: Path) -> Timeline:
    try:
        return Timeline.from_json(read_file(path).decode())
    except (InputError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from None


def records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the valid records in `lines`. Lines that a crash has truncated or an editor has damaged
    are skipped."""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and _is_sound(record):
                yield record


def _is_sound(record: dict[str, Any]) -> bool:
    """Return True if the record has a step, all necessary keys, and values that the report can
    show. The record of a step must have the keys in STEP. The record of a validation must have a
    perplexity or an accuracy."""
    if type(record.get("step")) is not int or not has_sound_values(record):
        return False
    if "loss" in record and not record.keys() >= STEP:
        return False
    return VALIDATION[0] not in record or any(key in record for key in VALIDATION[1:])
