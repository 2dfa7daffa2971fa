"""Measured times of attention and of weights' gradients as entries of the table of kernels."""

from collections.abc import Iterable, Mapping
from typing import Any

import tomlkit
from tomlkit.items import AoT, Table

WAYS = ("fa3", "cudnn", "flash")  # that the table may name
APART = 0.02  # of the largest value: a kernel further from float32 than this is not used


def filled(text: str, device: str, rows: Mapping[str, Mapping[str, Any]], source: str) -> str:
    """Return the table `text` with an entry of attention for a device such as "cuda 9.0".

    The entry has the kernels of `rows` that were measured and are accurate, quickest first. It
    comes before those of other devices, and replaces the device's own. `source` names the machine
    of the measurement. Without any such kernel the table is returned as it is.
    """
    times = {
        way: rows[way]["s"]
        for way in WAYS
        if "s" in rows.get(way, {}) and rows[way]["apart"] < APART
    }
    if not times:
        return text
    ways = sorted(times, key=lambda way: times[way])
    vendor, _, capability = device.partition(" ")
    table = tomlkit.parse(text)
    entry = tomlkit.table()
    entry.update({"device": vendor, "capability": capability, "ways": ways})
    listed = ", ".join(f"{way} {1e3 * times[way]:.3g} ms" for way in ways)
    entry["measured"] = f"{listed}, there and back ({source})"
    known = table["device_attention"]
    others = [row for row in known if (row["device"], row["capability"]) != (vendor, capability)]
    table["device_attention"] = _entries(entry, others)
    return tomlkit.dumps(table)


def with_weight_gradients(
    text: str, device: str, rows: Mapping[str, Mapping[str, Any]], source: str
) -> str:
    """Return the table `text` with an entry of weights' gradients for a device such as "cuda 9.0".

    The entry has the quicker of the two ways in `rows`; adding only if it is not further from
    float32 than rounding. The table is returned as it is where rounding was not measured, and where
    it has no entry for the vendor yet: the first torch whose library can add is not measured.
    """
    vendor = device.partition(" ")[0]
    table = tomlkit.parse(text)
    known = [entry for entry in table["weight_gradient"] if entry["device"] == vendor]
    rounds = rows.get("rounds", {})
    adds = rows.get("adds", {})
    if not known or "s" not in rounds:
        return text
    accurate = "s" in adds and adds["apart"] <= rounds["apart"]
    entry = tomlkit.table()
    entry.update({"device": vendor, "torch": known[0]["torch"]})
    entry["way"] = "adds" if accurate and adds["s"] < rounds["s"] else "rounds"
    added = f"adds {1e3 * adds['s']:.3g} ms" if "s" in adds else "adds: not there"
    entry["measured"] = f"{added}, rounds {1e3 * rounds['s']:.3g} ms ({source})"
    others = [other for other in table["weight_gradient"] if other["device"] != vendor]
    table["weight_gradient"] = _entries(entry, others)
    return tomlkit.dumps(table)


def _entries(first: Table, others: Iterable[Table]) -> AoT:
    entries = tomlkit.aot()
    for entry in (first, *others):
        entries.append(entry)
    return entries
