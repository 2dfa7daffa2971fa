"""List the files that one training step passes through, from the token file to the update.

To learn how the trainer works, read these files in this order. Tests count the lines of the files
and compare the sum with README.md.
"""

from collections.abc import Callable
from pathlib import Path
from token import COMMENT, DEDENT, ENCODING, ENDMARKER, INDENT, NEWLINE, NL, STRING
from tokenize import TokenInfo, tokenize
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "ptdmpi"


class StepPart(NamedTuple):
    """A part of a training step: its name, a description of its work, and the files with its code,
    in reading order."""

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


def code_lines_of(name: str) -> int:
    """Return the number of lines of a file that have code: neither blank, nor a comment or a
    docstring alone."""
    lines: set[int] = set()
    no_code = {COMMENT, NEWLINE, NL, INDENT, DEDENT, ENCODING, ENDMARKER}
    statement: list[TokenInfo] = []
    with open(SOURCE / name, "rb") as file:
        for token in tokenize(file.readline):
            if token.type not in no_code:
                statement.append(token)
            elif token.type == NEWLINE:
                if [one.type for one in statement] != [STRING]:  # a string alone is a docstring
                    for one in statement:
                        lines.update(range(one.start[0], one.end[0] + 1))
                statement = []
    return len(lines)


def total(count: Callable[[str], int] = lines_of) -> int:
    """Return the number of non-blank lines of all files in PARTS, or, if `count` is another
    function of a file, the sum of its results."""
    return sum(count(name) for part in PARTS for name in part.files)


def page() -> str:
    """Return the table of the parts in Markdown: each part, its files, and the number of lines of
    each file."""
    rows = ["| part | what happens | files (lines that are not blank) |", "|---|---|---|"]
    for part in PARTS:
        files = ", ".join(f"`{name}` ({lines_of(name)})" for name in part.files)
        rows.append(f"| {part.name} | {part.happens} | {files} |")
    rows.append(f"| **all** | | **{total():,} lines** |")
    return "\n".join(rows) + "\n"
