"""Where a run stands while it goes: read from its directory alone, without MPI or torch."""

import contextlib
import itertools
import json
import math
import os
import statistics
import time
import tomllib
from collections import deque
from pathlib import Path
from typing import Any

from ptdmpi.config import InputError
from ptdmpi.sinks.record import median

RECENT = 50  # steps that rates are taken from
MOST = 10**12  # steps; more is damage
MOST_DRAWN = 1e300
LONGEST_STEP_S = 1e7
# What a record of a step must have to be shown.
STEP_NUMBERS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_s",
    "model_tflops_per_rank",
    "peak_memory_bytes",
)
SCORES = ("accuracy", "exact_match")
REMARKS = 3  # lines of the log that are shown
SILENT_S, SILENT_STEPS = 60.0, 10.0  # without a word for longer than both: something is wrong
# What a damaged config.toml raises.
BROKEN = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)
TELLING = (
    "warning",
    "lost in step",
    "skipped",
    "no rank has begun",
    "stopped early",
)


class Tail:
    """The whole lines that a growing file has got since it was asked last. A file that was replaced
    or cut (a start that dropped records) is read from its beginning; `begun_anew` says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun_anew = True
        self._inode, self._place = -1, 0

    def lines(self) -> list[str]:
        self.begun_anew = False
        try:
            with self.path.open("rb") as file:
                inode, size = _identity(file.fileno())
                if inode != self._inode or size < self._place:
                    self._inode, self._place, self.begun_anew = inode, 0, True
                file.seek(self._place)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._place += len(whole)
        return whole.decode(errors="replace").splitlines()


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_ino, found.st_size


class Watched:
    """One run that is looked at again and again. Raises InputError if `path` is no run's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._read_config()
        except BROKEN as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{path} is no run directory: config.toml: {reason}") from None
        self._metrics, self._log = Tail(path / "metrics.jsonl"), Tail(path / "log.txt")
        self._forget()
        self._remarks: deque[str] = deque(maxlen=REMARKS)
        self._last_line = ""

    def _read_config(self) -> None:
        config = tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        steps = int(config["run"]["steps"])
        if not 1 <= steps <= MOST:
            raise ValueError(f"run.steps = {steps}")
        self.name = str(config["run"]["name"])
        self.steps = steps

    def _forget(self) -> None:
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._losses: list[float] = []
        self._validations: list[dict[str, Any]] = []
        self._tasks: dict[str, Any] = {}
        self._slow: list[dict[str, Any]] = []
        self._slow_step = 0

    def status(self) -> dict[str, Any]:
        """Everything that is known now; absent keys are not known yet."""
        with contextlib.suppress(*BROKEN):
            self._read_config()  # a new start may have other steps; one half written is skipped
        lines = self._metrics.lines()
        if self._metrics.begun_anew:
            self._forget()
        for line in lines:
            self._take(line)
        for line in self._log.lines():
            self._last_line = line
            if any(word in line for word in TELLING):
                self._remarks.append(line)
        age_s = self._age_s()
        found: dict[str, Any] = {
            "path": str(self.path),
            "name": self.name,
            "state": self._state(age_s),
            "steps": self.steps,
            "silent_s": age_s,
        }
        if self._recent:
            found |= self._progress()
        if self._validations:
            found |= self._validation()
        if self._tasks:
            found |= {"tasks": self._tasks["tasks"], "tasks_step": self._tasks["step"]}
        checkpoint = _newest_checkpoint(self.path / "checkpoints")
        if checkpoint:
            found["checkpoint"] = checkpoint
        found["slow_ranks"] = self._slow
        found["remarks"] = list(self._remarks)
        return found

    def _take(self, line: str) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(record, dict) or not _is_sound(record):
            return
        if "validation_loss" in record:
            self._validations.append(record)
        elif "tasks" in record:
            self._tasks = record
        elif "loss" in record:
            self._recent.append(record)
            self._losses.append(record["loss"])
            # judged every 20 steps or so, and in a record only where some are slow
            if "slow_ranks" in record:
                self._slow, self._slow_step = record["slow_ranks"], record["step"]
            elif record["step"] >= self._slow_step + RECENT:
                self._slow = []

    def _progress(self) -> dict[str, Any]:
        last = self._recent[-1]
        step_s = statistics.median(record["step_time_s"] for record in self._recent)
        keys = ("step", "loss", "grad_norm", "learning_rate", "tokens", "layout", "rank_count")
        found = {key: last[key] for key in keys if key in last}
        for key in ("tokens_per_s", "model_tflops_per_rank", "mfu"):
            found[key] = median(record[key] for record in self._recent)
        found["step_time_s"] = step_s
        found["left_s"] = max(0, self.steps - last["step"]) * step_s
        found["peak_memory_bytes"] = max(record["peak_memory_bytes"] for record in self._recent)
        found["losses"] = binned(self._losses, 60)
        return found

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
        """Seconds since the run last wrote anything, by the clocks of this host and the disk."""
        newest = 0.0
        for name in ("metrics.jsonl", "log.txt", "config.toml"):
            with contextlib.suppress(OSError):
                newest = max(newest, (self.path / name).stat().st_mtime)
        return max(0.0, time.time() - newest)

    def _state(self, age_s: float) -> str:
        if (self.path / "done").exists():
            return "done"
        if "stopped on request" in self._last_line:
            return "stopped"
        longest_s = max((record["step_time_s"] for record in self._recent), default=SILENT_S)
        if age_s > max(SILENT_S, SILENT_STEPS * longest_s):
            return "silent"
        return "running" if self._recent else "starting"


def _is_sound(record: dict[str, Any]) -> bool:
    """Return True if everything that is shown of a record has its kind and a possible value: a line
    that a disk has damaged may still be JSON."""
    step = record.get("step")
    if type(step) is not int or not 0 <= step <= MOST:
        return False
    if "validation_loss" in record:
        return _is_number(record["validation_loss"])
    if "tasks" in record:
        return _are_scores(record["tasks"])
    return "loss" not in record or _is_sound_step(record)


def _is_sound_step(record: dict[str, Any]) -> bool:
    step_s = record.get("step_time_s")
    slow = record.get("slow_ranks", [])
    return (
        all(_is_number(record.get(key)) for key in STEP_NUMBERS)
        and isinstance(step_s, float | int)
        and 0 <= step_s <= LONGEST_STEP_S
        and record["loss"] != -math.inf
        and "mfu" in record
        and (record["mfu"] is None or _is_number(record["mfu"]))
        and isinstance(record.get("layout", ""), str)
        and ("layout" not in record or type(record.get("rank_count")) is int)
        and isinstance(slow, list)
        and all(isinstance(rank, dict) and _is_number(rank.get("factor")) for rank in slow)
        and all(isinstance(rank.get("host"), str) and "rank" in rank for rank in slow)
    )


def _is_number(value: Any) -> bool:
    """Return True for a number that can be drawn: a float, NaN and infinities included, or an
    integer that has a float."""
    if isinstance(value, float):
        return not MOST_DRAWN < abs(value) < math.inf
    return type(value) is int and abs(value) <= MOST_DRAWN


def _are_scores(tasks: Any) -> bool:
    """Return True if `tasks` has a score of each task file."""
    if not isinstance(tasks, dict) or not all(isinstance(one, dict) for one in tasks.values()):
        return False
    scores = [[one[key] for key in SCORES if key in one] for one in tasks.values()]
    return all(numbers and all(map(_is_number, numbers)) for numbers in scores)


def binned(values: list[float], most: int) -> list[float]:
    """At most `most` means of neighbours, in order."""
    if len(values) <= most:
        return list(values)
    edges = [round(i * len(values) / most) for i in range(most + 1)]
    return [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]


def _newest_checkpoint(directory: Path) -> dict[str, Any] | None:
    """By its name; whether it is sound, `ptdmpi checkpoint verify` says."""
    try:
        name = (directory / "latest").read_text(encoding="utf-8").strip()
        age_s = max(0.0, time.time() - (directory / name).stat().st_mtime)
        return {"name": name, "step": int(name.removeprefix("step-")), "age_s": age_s}
    except (OSError, ValueError):
        return None
