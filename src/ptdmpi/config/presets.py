"""Models by name, as tables of keys of [model] and `vocab_size`."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

# What a preset of Narayanan et al. 2021 leaves out.
DEFAULTS = {"seq_length": 2048, "vocab_size": 51200}


@cache
def model_presets() -> dict[str, dict[str, Any]]:
    """Name -> its complete table."""
    text = files("ptdmpi").joinpath("presets", "models.toml").read_text(encoding="utf-8")
    return {name: {**DEFAULTS, **keys} for name, keys in tomllib.loads(text).items()}


def without_preset(model: Mapping[str, Any]) -> dict[str, Any]:
    """[model] with the keys of its preset written out; a key given beside `preset` wins. The
    vocabulary comes from the data. Raises KeyError for an unknown preset."""
    preset = model_presets()[model["preset"]]
    own = {key: value for key, value in model.items() if key != "preset"}
    return {**{key: value for key, value in preset.items() if key != "vocab_size"}, **own}
