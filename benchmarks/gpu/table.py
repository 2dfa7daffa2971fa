"""What was measured of attention and of weights' gradients, as entries of the table of kernels."""

from collections.abc import Iterable, Mapping
from typing import Any

import tomlkit
from tomlkit.items import AoT, Table

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
    table["device_attention"] = _entries(entry, others)
    return tomlkit.dumps(table)


def with_weight_gradients(
    text: str, device: str, rows: Mapping[str, Mapping[str, Any]], said: str
) -> str:
    """The table with the entry of a device "cuda 9.0" for gradients of weights, by the quicker of
    the two ways in `rows`; adding is none where it is further from float32. Where rounding was not
    measured, the table as it is, and so where there is no entry yet: from which torch on a library
    can add is not measured."""
    vendor, table = device.partition(" ")[0], tomlkit.parse(text)
    known = [one for one in table["weight_gradient"] if one["device"] == vendor]
    rounds, adds = rows.get("rounds", {}), rows.get("adds", {})
    if not known or "s" not in rounds:
        return text
    right = "s" in adds and adds["apart"] <= rounds["apart"]
    entry = tomlkit.table()
    entry.update({"device": vendor, "torch": known[0]["torch"]})
    entry["way"] = "adds" if right and adds["s"] < rounds["s"] else "rounds"
    told = f"adds {1e3 * adds['s']:.3g} ms" if "s" in adds else "adds: not there"
    entry["measured"] = f"{told}, rounds {1e3 * rounds['s']:.3g} ms ({said})"
    others = [one for one in table["weight_gradient"] if one["device"] != vendor]
    table["weight_gradient"] = _entries(entry, others)
    return tomlkit.dumps(table)


def _entries(first: Table, others: Iterable[Table]) -> AoT:
    entries = tomlkit.aot()
    for one in (first, *others):
        entries.append(one)
    return entries
