"""The table of measurements in presets/kernels.toml, which determines the fastest kernels."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def table() -> dict[str, Any]:
    """Return the table of measurements: kind of kernel -> list of entries. The first entry that
    fits the machine is used."""
    text = files("ptdmpi").joinpath("presets", "kernels.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
