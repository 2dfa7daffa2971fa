"""List the files that one training step passes through, from the token file to the update.

To learn how the trainer works, read these files in this order. Tests count the lines of the files
and compare the sum with README.md.
"""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "ptdmpi"


class StepPart(NamedTuple):
    """A part of a step: its name, a description of the work, and the files with its code, in
    reading order."""

    name: str
    happens: str
    files: tuple[str, ...]


PARTS = (
    StepPart(
        "data",
        "the order of samples, the shards, microbatches on the device",
        ("data/order.py", "data/shards.py", "data/batches.py", "train/feed.py", "model/batch.py"),
    ),
    StepPart(
        "schedule",
        "the kinds of op, their order on each rank, the messages between ranks",
        ("plan/schedule/ops.py", "plan/schedule/orders.py", "plan/schedule/program.py"),
    ),
    StepPart(
        "engine",
        "one step: the program runs, op by op",
        ("engine/engine.py", "engine/runner.py"),
    ),
    StepPart(
        "model",
        "forward and backward of a stage, and the loss",
        (
            "model/stage.py",
            "model/transformer.py",
            "model/tensor_parallel.py",
            "model/output/cross_entropy.py",
            "model/parameters.py",
        ),
    ),
    StepPart(
        "update",
        "gradients are summed over ranks, the norm is checked, the optimizer updates",
        (
            "engine/gradients.py",
            "engine/data_parallel/method.py",
            "engine/data_parallel/reduce.py",
            "engine/optimizer.py",
        ),
    ),
)


def lines_of(name: str) -> int:
    """Return the number of non-blank lines of a file in `src/ptdmpi`."""
    text = (SOURCE / name).read_text(encoding="utf-8")
    return sum(bool(line.strip()) for line in text.splitlines())


def total() -> int:
    """Return the number of non-blank lines of all files in PARTS."""
    return sum(lines_of(name) for part in PARTS for name in part.files)


def page() -> str:
    """Return the table of the parts in Markdown: each part, its files, and the number of lines of
    each file."""
    rows = ["| part | what happens | files (lines that are not blank) |", "|---|---|---|"]
    for part in PARTS:
        files = ", ".join(f"`{name}` ({lines_of(name)})" for name in part.files)
        rows.append(f"| {part.name} | {part.happens} | {files} |")
    rows.append(f"| **all** | | **{total():,} lines** |")
    return "\n".join(rows) + "\n"
