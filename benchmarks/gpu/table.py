"""What was measured of attention, as an entry of presets/kernels.toml."""

from collections.abc import Mapping
from typing import Any

import tomlkit

WAYS = ("fa3", "cudnn", "flash")  # that the table may name
APART = 0.02  # of the largest value: what is further from float32 is no way


def filled(text: str, device: str, rows: Mapping[str, Mapping[str, Any]], said: str) -> str:
    """The table with an entry for a device "cuda 9.0" in front of the others of attention on
    devices, in place of one that it had: the ways of `rows` that were measured, quickest first.
    Without any the table as it is."""
    measured = {way: rows[way]["s"] for way in WAYS if "s" in rows.get(way, {})}
    right = {way: s for way, s in measured.items() if rows[way]["apart"] < APART}
    if not right:
        return text
    ways = sorted(right, key=lambda way: right[way])
    vendor, _, capability = device.partition(" ")
    table = tomlkit.parse(text)
    entry = tomlkit.table()
    entry.update({"device": vendor, "capability": capability, "ways": ways})
    times = ", ".join(f"{way} {1e3 * right[way]:.3g} ms" for way in ways)
    entry["measured"] = f"{times}, there and back ({said})"
    known = table["device_attention"]
    others = [one for one in known if (one["device"], one["capability"]) != (vendor, capability)]
    entries = tomlkit.aot()
    for one in (entry, *others):
        entries.append(one)
    table["device_attention"] = entries
    return tomlkit.dumps(table)
