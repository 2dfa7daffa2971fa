"""Conversion of the records of `metrics.jsonl` to named numbers. All sinks use this conversion."""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

# key of a record -> the group in which sinks show its values; all other keys are in the group
# "train"
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

# keys that sinks do not show, because the step is the horizontal axis of all curves, and because
# the numbers of messages and bytes are the same in each step
NOT_SHOWN = ("step", "wire_bytes", "wire_messages")
# entries in the results of a task file that describe the file, and do not depend on the model
OF_FILE = ("items", "samples", "truncated")


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers in a record, without its step, as a dict: name -> number. A name consists
    of a group and the key of the record, such as "train/loss".

    Each number in a list or a table has its own name, such as "data/epochs/0". Texts, and numbers
    that are the same in every record, are left out.
    """
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if key == "tasks":
            for path, scores in value.items():
                measured = {name: score for name, score in scores.items() if name not in OF_FILE}
                numbers |= _numbers(f"tasks/{path}", measured)
        elif key not in NOT_SHOWN:
            numbers |= _numbers(f"{_group(key)}/{key}", value)
    return numbers


def _numbers(name: str, value: Any) -> dict[str, float]:
    """Return the numbers in `value` as a dict: name -> number. A single number is called `name`.
    The number at an index of a list, or at a key of a table, is called `name`/INDEX or
    `name`/KEY."""
    items = {name: value}
    if isinstance(value, dict):
        items = {f"{name}/{key}": item for key, item in value.items()}
    elif isinstance(value, list):
        items = {f"{name}/{place}": item for place, item in enumerate(value)}
    return {key: float(item) for key, item in items.items() if isinstance(item, int | float)}


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None.

    Return None if all values are None. A value can be None: for example, the MFU is None if the
    peak FLOP/s of the device are unknown.
    """
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def task_score(values: Mapping[str, Any]) -> tuple[str, float]:
    """Return the name and the value of the main score in the results of a task file. The main score
    is the accuracy. For a task without accuracy, it is the exact match."""
    key = "accuracy" if "accuracy" in values else "exact_match"
    return key.replace("_", " "), float(values[key])


def _group(key: str) -> str:
    words = key.split("_")
    if words[0] == "checkpoint":
        return "checkpoint"
    if "validation" in words:
        return "validation"
    return GROUPS.get(key, "train")


def kept_records(metrics: Path) -> Iterator[dict[str, Any]]:
    """Yield the records in the file `metrics`, which is the `metrics.jsonl` of a run, in their
    order. Lines that are not records are skipped."""
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
