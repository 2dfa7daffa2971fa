"""Functions that write measured times of attention, of weight gradients and of kernels in Triton
into the table of kernels (src/ptdmpi/presets/kernels.toml)."""

from collections.abc import Iterable, Mapping
from typing import Any

import tomlkit
from tomlkit.items import AoT, Table

WAYS = ("fa3", "cudnn", "flash")  # The attention kernels that the table may name.
# A kernel is not used if its result differs from a float32 result by more than this fraction of the
# largest value.
APART = 0.02
# kind of kernels in Triton -> the small kernel whose measured times decide whether this kind is
# used
IN_TRITON = {
    "loss": "loss",
    "norm": "RMSNorm",
    "gated": "SwiGLU",
    "dropout": "dropout",
    "rope": "RoPE",
    "update": "AdamW",
    "gelu": "GELU",
}


def filled(text: str, device: str, rows: Mapping[str, Mapping[str, Any]], source: str) -> str:
    """Return the table `text` with an entry for attention on a device such as "cuda 9.0".

    The entry lists, fastest first, those kernels of `rows` that were measured and are accurate (see
    APART). The new entry comes before the entries of other devices, and replaces the old entry of
    this device. `source` names the machine of the measurement. If no measured kernel is accurate,
    the table is returned unchanged.
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
    entry["measured"] = f"{listed}, forward and backward ({source})"
    known = table["device_attention"]
    others = [row for row in known if (row["device"], row["capability"]) != (vendor, capability)]
    table["device_attention"] = _entries(entry, others)
    return tomlkit.dumps(table)


def with_weight_gradients(
    text: str, device: str, rows: Mapping[str, Mapping[str, Any]], source: str
) -> str:
    """Return the table `text` with an entry for weight gradients on a device such as "cuda 9.0".

    The entry names the faster of the two methods "adds" and "rounds" in `rows`. It names "adds"
    only if the result of "adds" is not further from float32 than the result of "rounds". The table
    is returned unchanged if "rounds" was not measured. The table is also returned unchanged if it
    has no entry for the vendor of the device, because the new entry must copy a value from that
    entry: the first version of torch that has "adds".
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


def with_triton(text: str, device: str, rows: Mapping[str, Mapping[str, Any]], source: str) -> str:
    """Return the table `text` with an entry for kernels in Triton on a device such as "cuda 9.0".

    `rows` are the rows of small kernels. The entry lists the kinds whose kernel in Triton is faster
    than ptdmpi's composition of torch's operations and is accurate (see APART). The table is
    returned unchanged if no kernel in Triton was measured.
    """
    taken, words = [], []
    for kind, name in IN_TRITON.items():
        ours, triton = (rows.get(f"{name}, {way}", {}) for way in ("ours", "Triton"))
        if "s" not in ours or "s" not in triton:
            continue
        words.append(f"{name} {1e3 * triton['s']:.3g} ms, torch's {1e3 * ours['s']:.3g} ms")
        if triton["s"] < ours["s"] and triton["apart"] < APART:
            taken.append(kind)
    if not words:
        return text
    vendor, _, capability = device.partition(" ")
    table = tomlkit.parse(text)
    entry = tomlkit.table()
    entry.update({"device": vendor, "capability": capability, "kinds": taken})
    entry["measured"] = f"{'; '.join(words)}, forward and backward ({source})"
    known = table["device_triton"]
    others = [row for row in known if (row["device"], row["capability"]) != (vendor, capability)]
    table["device_triton"] = _entries(entry, others)
    return tomlkit.dumps(table)


def _entries(first: Table, others: Iterable[Table]) -> AoT:
    entries = tomlkit.aot()
    for entry in (first, *others):
        entries.append(entry)
    return entries
