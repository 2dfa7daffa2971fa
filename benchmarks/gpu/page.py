"""What was measured on one GPU as a page: docs/gpu.md"""

from typing import Any

from benchmarks.gpu.reasons import WORDS, done, reasons

HEAD = """# On one GPU

Written by `make gpu`, on {date}, commit {commit}, {libraries}.

Device: {device}.
"""


def page(found: dict[str, Any]) -> str:
    """The page: a table for each part that was measured, and the reason for each that was not."""
    libraries = ", ".join(f"{name} {version}" for name, version in found["libraries"].items())
    device = found["device"] or "none. Nothing on this page was measured on a device"
    head = HEAD.format(
        date=found["date"], commit=found["commit"], libraries=libraries, device=device
    )
    lines = [head]
    left = [name for name, values in found["parts"].items() if not done(values)]
    if left:
        lines.append(f"Not done yet, and gone on with by the same command: {'; '.join(left)}.\n")
    for name, values in found["parts"].items():
        lines.append(f"## {name[0].upper()}{name[1:]}\n")
        lines.append(_part(values))
    return "\n".join(lines).rstrip() + "\n"


def _part(values: dict[str, Any]) -> str:
    why = reasons(values)
    said = f"Not measured: {why.pop('')}.\n" if "" in why else ""
    rows = {key: one for key, one in values.items() if isinstance(one, dict)}
    if not rows:
        rows = {} if said else {"": values}
    # what lacks has its reason in one column, whichever it is
    told = {name: _told(row, why.get(name)) for name, row in rows.items()}
    if not told:
        return said
    keys = list(dict.fromkeys(key for row in told.values() for key in row))
    lines = ["| | " + " | ".join(keys) + " |", "|---|" + "---|" * len(keys)]
    for name, row in told.items():
        lines.append(f"| {name} | " + " | ".join(_shown(row.get(key)) for key in keys) + " |")
    return "\n".join(filter(None, [said, *lines])) + "\n"


def _told(row: dict[str, Any], why: str | None) -> dict[str, Any]:
    shown = {key: value for key, value in row.items() if key not in WORDS}
    return shown if why is None else {**shown, "not measured": why}


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_shown(one) for one in value)
    return "" if value is None else str(value).replace("|", "\\|")
