"""The progress of a run during training, read from the files in the run directory without MPI or
torch."""

import contextlib
import itertools
import json
import math
import os
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

from ptdmpi.base.disk import open_file, read_file
from ptdmpi.base.toml import tables_of
from ptdmpi.config import InputError
from ptdmpi.report.sound import LineCount, are_scores, is_number
from ptdmpi.sinks.record import median

RECENT = 50  # the displayed rates are medians over this number of newest steps.
# a record with a larger step, or with a longer step time in seconds, counts as damaged
MOST_STEPS = 10**12
LONGEST_STEP_S = 1e7
# the record of a step is used only if the values of these keys are numbers
STEP_NUMBERS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_s",
    "model_tflops_per_rank",
    "peak_memory_bytes",
)
REMARKS = 3  # number of newest warnings in the log that are displayed.
# A run is reported as silent if it has written nothing for SILENT_S seconds, and for SILENT_STEPS
# times the duration of its longest recent step.
SILENT_S = 60.0
SILENT_STEPS = 10.0
# the exceptions that may be raised when a damaged config.toml is read
BROKEN = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)
# A line of the log that contains one of these words is a warning.
WARNINGS = (
    "warning",
    "lost in step",
    "skipped",
    "no rank has begun",
    "stopped early",
)


class Tail:
    """A reader of a growing file. Each call of `lines` returns only the new complete lines.

    A restarted run may remove records, so the file may be replaced or truncated. In that case the
    reader begins again at the start of the file, and `begun_anew` is True after this call of
    `lines`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun_anew = True
        self._inode = -1
        self._offset = 0

    def lines(self) -> list[str]:
        """Return the lines that were written since the last call. Return an empty list if the file
        cannot be read."""
        self.begun_anew = False
        try:
            with open_file(self.path, "rb") as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._inode or state.st_size < self._offset:
                    self._inode = state.st_ino
                    self._offset = 0
                    self.begun_anew = True
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [line.decode(errors="replace") for line in whole.splitlines()]


class Watched:
    """A reader of the status of the run in the directory `path`. The status can be read repeatedly
    while the run trains.

    Raises InputError if `path` is not a run directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._read_config()
        except BROKEN as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{path} is not a run directory: config.toml: {reason}") from None
        self._metrics = Tail(path / "metrics.jsonl")
        self._log = Tail(path / "log.txt")
        self._forget()
        self._remarks: deque[str] = deque(maxlen=REMARKS)
        self._last_line = ""

    def _read_config(self) -> None:
        config = tables_of(read_file(self.path / "config.toml"))
        steps = int(config["run"]["steps"])
        if not 1 <= steps <= MOST_STEPS:
            raise ValueError(f"run.steps = {steps}")
        self.name = str(config["run"]["name"])
        self.steps = steps

    def _forget(self) -> None:
        """Discard all stored records, because the file of records was replaced."""
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._losses: list[float] = []
        self._validations: list[dict[str, Any]] = []
        self._tasks: dict[str, Any] = {}
        self._slow: list[dict[str, Any]] = []
        self._slow_step = 0
        self._count = LineCount("metrics.jsonl")

    def status(self) -> dict[str, Any]:
        """Return the present status of the run. Keys whose values are unknown are absent.
        "problems" has a text for each file that cannot be read completely. If the file
        `checkpoints/latest` cannot be read, or names no checkpoint, "checkpoint" is None."""
        with contextlib.suppress(*BROKEN):
            # A restart of the run may have changed the number of steps. Ignore a config.toml that
            # is incomplete now.
            self._read_config()
        lines = self._metrics.lines()
        if self._metrics.begun_anew:
            self._forget()
        for line in lines:
            self._count.add(line, self._take(line))
        for line in self._log.lines():
            self._last_line = line
            if any(word in line for word in WARNINGS):
                self._remarks.append(line)
        age_s = self._age_s()
        status: dict[str, Any] = {
            "path": str(self.path),
            "name": self.name,
            "state": self._state(age_s),
            "steps": self.steps,
            "silent_s": age_s,
        }
        if self._recent:
            status |= self._progress()
        if self._validations:
            status |= self._validation()
        if self._tasks:
            status |= {"tasks": self._tasks["tasks"], "tasks_step": self._tasks["step"]}
        problems = self._count.problems()
        try:
            if checkpoint := _newest_checkpoint(self.path / "checkpoints"):
                status["checkpoint"] = checkpoint
        except ValueError as error:
            status["checkpoint"] = None
            problems.append(str(error))
        status["problems"] = problems
        status["slow_ranks"] = self._slow
        status["remarks"] = list(self._remarks)
        return status

    def _take(self, line: str) -> bool:
        """Store the record that `line` contains. Return False if the line is not a record."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(record, dict) or not _is_sound(record):
            return False
        if "validation_loss" in record:
            self._validations.append(record)
        elif "tasks" in record:
            self._tasks = record
        elif "loss" in record:
            self._recent.append(record)
            self._losses.append(record["loss"])
            # A run looks for slow ranks about every 20 steps, but records "slow_ranks" only if it
            # finds slow ranks. So discard the slow ranks after RECENT steps without this entry.
            if "slow_ranks" in record:
                self._slow = record["slow_ranks"]
                self._slow_step = record["step"]
            elif record["step"] >= self._slow_step + RECENT:
                self._slow = []
        return True

    def _progress(self) -> dict[str, Any]:
        last = self._recent[-1]
        step_s = statistics.median(record["step_time_s"] for record in self._recent)
        keys = ("step", "loss", "grad_norm", "learning_rate", "tokens", "layout", "rank_count")
        progress = {key: last[key] for key in keys if key in last}
        for key in ("tokens_per_s", "model_tflops_per_rank", "mfu"):
            progress[key] = median(record[key] for record in self._recent)
        progress["step_time_s"] = step_s
        progress["left_s"] = max(0, self.steps - last["step"]) * step_s
        progress["peak_memory_bytes"] = max(record["peak_memory_bytes"] for record in self._recent)
        progress["losses"] = binned(self._losses, 60)
        return progress

    def _validation(self) -> dict[str, Any]:
        last = self._validations[-1]
        best = min(self._validations, key=lambda record: record["validation_loss"])
        return {
            "validation_loss": last["validation_loss"],
            "validation_step": last["step"],
            "best_validation_loss": best["validation_loss"],
            "best_validation_step": best["step"],
        }

    def _age_s(self) -> float:
        """Return the number of seconds since the run last wrote a file: the time of this host's
        clock minus the modification time of the newest file."""
        newest = 0.0
        for name in ("metrics.jsonl", "log.txt", "config.toml"):
            with contextlib.suppress(OSError):
                newest = max(newest, (self.path / name).stat().st_mtime)
        return max(0.0, time.time() - newest)

    def _state(self, age_s: float) -> str:
        """Return the state of the run: starting, running, silent, stopped or done."""
        if (self.path / "done").exists():
            return "done"
        if "stopped on request" in self._last_line:
            return "stopped"
        longest_s = max((record["step_time_s"] for record in self._recent), default=SILENT_S)
        if age_s > max(SILENT_S, SILENT_STEPS * longest_s):
            return "silent"
        return "running" if self._recent else "starting"


def _is_sound(record: dict[str, Any]) -> bool:
    """Return True if the displayed values of a record have the right types, and no number has an
    impossible value.

    The check is needed because a damaged line may still be valid JSON.
    """
    step = record.get("step")
    if type(step) is not int or not 0 <= step <= MOST_STEPS:
        return False
    if "validation_loss" in record:
        return is_number(record["validation_loss"])
    if "tasks" in record:
        return are_scores(record["tasks"])
    return "loss" not in record or _is_sound_step(record)


def _is_sound_step(record: dict[str, Any]) -> bool:
    """Return True if the record of a step has all displayed values with the right types, and no
    number has an impossible value."""
    step_s = record.get("step_time_s")
    slow = record.get("slow_ranks", [])
    return (
        all(is_number(record.get(key)) for key in STEP_NUMBERS)
        and isinstance(step_s, float | int)
        and 0 <= step_s <= LONGEST_STEP_S
        and record["loss"] != -math.inf
        and "mfu" in record
        and (record["mfu"] is None or is_number(record["mfu"]))
        and isinstance(record.get("layout", ""), str)
        and ("layout" not in record or type(record.get("rank_count")) is int)
        and isinstance(slow, list)
        and all(isinstance(rank, dict) and is_number(rank.get("factor")) for rank in slow)
        and all(isinstance(rank.get("host"), str) and "rank" in rank for rank in slow)
    )


def binned(values: list[float], most: int) -> list[float]:
    """Return the values, in their order, reduced to at most `most` values by averaging neighbouring
    values."""
    if len(values) <= most:
        return list(values)
    edges = [round(i * len(values) / most) for i in range(most + 1)]
    return [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]


def _newest_checkpoint(directory: Path) -> dict[str, Any] | None:
    """Return the name, the step and the age in seconds of the checkpoint that the file `latest`
    names. The checkpoint itself is not checked. Return None if there is no such file. Raise
    ValueError if the file cannot be read, or names no checkpoint."""
    latest = directory / "latest"
    try:
        name = read_file(latest).decode().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"checkpoints/latest: {error.strerror}") from None
    except UnicodeDecodeError:
        name = ""
    try:
        step = int(name.removeprefix("step-"))
        age_s = max(0.0, time.time() - (directory / name).stat().st_mtime)
    except (OSError, ValueError):
        raise ValueError("checkpoints/latest: names no checkpoint of this run") from None
    return {"name": name, "step": step, "age_s": age_s}
