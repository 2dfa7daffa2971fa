"""A record of `metrics.jsonl` as named numbers, the same for every tool; and the kept records."""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

# key -> the group that a tool shows it in; what is not named here is of its training step
GROUPS = {
    "step_time_s": "speed",
    "tasks_time_s": "speed",
    "tokens_per_s": "speed",
    "model_tflops_per_rank": "speed",
    "hardware_tflops_per_rank": "speed",
    "mfu": "speed",
    "peak_memory_bytes": "speed",
    "tokens": "data",
    "samples_drawn": "data",
    "epochs": "data",
    "rank_count": "layout",
    "vocab_size": "layout",
}

SAME = ("step", "wire_bytes", "wire_messages")  # of each step alike, or the curves' own axis
OF_FILE = ("items", "samples", "truncated")  # what is known of a task file before it is asked


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """Every number of a record by a name such as "train/loss", without its step.

    Lists and tables become one number for each item ("data/epochs/0"); texts have no curve, nor has
    what is the same each time.
    """
    found: dict[str, float] = {}
    for key, value in record.items():
        if key == "tasks":
            for path, scores in value.items():
                kept = {name: one for name, one in scores.items() if name not in OF_FILE}
                found |= _numbers(f"tasks/{path}", kept)
        elif key not in SAME:
            found |= _numbers(f"{_group(key)}/{key}", value)
    return found


def _numbers(name: str, value: Any) -> dict[str, float]:
    items = {name: value}
    if isinstance(value, dict):
        items = {f"{name}/{part}": one for part, one in value.items()}
    elif isinstance(value, list):
        items = {f"{name}/{number}": one for number, one in enumerate(value)}
    return {k: float(one) for k, one in items.items() if isinstance(one, int | float)}


def median(values: Iterable[float | None]) -> float | None:
    """The median of what is known; None where nothing is, such as MFU of an unknown device."""
    known = [one for one in values if one is not None]
    return statistics.median(known) if known else None


def task_score(values: Mapping[str, Any]) -> tuple[str, float]:
    """The name and value of the one number that stands for a task file."""
    key = next(one for one in ("accuracy", "exact_match") if one in values)
    return key.replace("_", " "), float(values[key])


def _group(key: str) -> str:
    first = key.partition("_")[0]
    if first == "checkpoint":
        return first
    return "validation" if "validation" in key.split("_") else GROUPS.get(key, "train")


def kept_records(metrics: Path) -> Iterator[dict[str, Any]]:
    """The whole records of a run so far; a line that is none is stepped over."""
    if not metrics.is_file():
        return
    with metrics.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record
