"""The page about the measurement of one GPU, docs/reference/gpu.md."""

from pathlib import Path
from typing import Any

from benchmarks.gpu.reasons import WORDS, done, reasons

HEAD = """# On one GPU

Written by `make gpu`, on {date}, commit {commit}, {libraries}.

Device: {device}.

In the titles, "by" names another trainer, and "in turn" means that ptdmpi and transformers
alternate. "Wires" are transports (`comm.wire`), and "overlap" is the fraction of the time of
messages in which the rank also computes.

[Counted without a GPU](gpu-dry.md) has the launches, bytes and memory of the same models, which
`make gpu-dry` counts on any machine.
"""
RECIPE = Path(__file__).parent / "bare-machine.md"


def page(everything: dict[str, Any]) -> str:
    """Return the page. The page has a table for each part that was measured, the reason for each
    part that was not measured, and instructions for a machine without a network. `everything` is
    the content of latest.json."""
    libraries = ", ".join(f"{name} {version}" for name, version in everything["libraries"].items())
    device = everything["device"] or "none. Nothing on this page was measured on a device"
    head = HEAD.format(
        date=everything["date"], commit=everything["commit"], libraries=libraries, device=device
    )
    lines = [head]
    left = [name for name, part in everything["parts"].items() if not done(part)]
    if left:
        lines.append(f"Not done yet; the same command continues with: {'; '.join(left)}.\n")
    for name, part in everything["parts"].items():
        lines.append(f"## {name[0].upper()}{name[1:]}\n")
        lines.append(_section(part))
    lines.append(RECIPE.read_text(encoding="utf-8"))
    return "\n".join(lines).rstrip() + "\n"


def _section(part: dict[str, Any]) -> str:
    """Return the section about one part: the reason why the part was not measured, if there is one,
    and the rows of the part as a table. A part that has no separate rows is shown as one row."""
    why = reasons(part)
    reason = ""
    if "" in why:
        reason = f"Not measured: {why.pop('')}.\n"
    rows = {name: row for name, row in part.items() if isinstance(row, dict)}
    if not rows and not reason:
        rows = {"": part}
    if not rows:
        return reason
    cells = {name: _cells(row, why.get(name)) for name, row in rows.items()}
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for name, row in cells.items():
        values = " | ".join(_shown(row.get(column)) for column in columns)
        lines.append(f"| {name} | {values} |")
    return "\n".join(filter(None, [reason, *lines])) + "\n"


def _cells(row: dict[str, Any], why: str | None) -> dict[str, Any]:
    """Return the cells of one row, by the headings of their columns. One column has all reasons why
    a row was not measured."""
    cells = {column: value for column, value in row.items() if column not in WORDS}
    return cells if why is None else {**cells, "not measured": why}


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return "" if value is None else str(value).replace("|", "\\|")
