"""What was measured on one GPU as a page: docs/gpu.md"""

from typing import Any

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
    for name, values in found["parts"].items():
        lines.append(f"## {name[0].upper()}{name[1:]}\n")
        lines.append(_part(values))
    return "\n".join(lines).rstrip() + "\n"


def _part(values: dict[str, Any]) -> str:
    for word in ("skipped", "failed"):
        if word in values:
            return f"Not measured: {values[word]}.\n"
    rows = values if all(isinstance(one, dict) for one in values.values()) else {"": values}
    keys = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = ["| | " + " | ".join(keys) + " |", "|---|" + "---|" * len(keys)]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(_shown(row.get(key)) for key in keys) + " |")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_shown(one) for one in value)
    return "" if value is None else str(value)
