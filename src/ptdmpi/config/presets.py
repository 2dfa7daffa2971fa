"""Presets: named models, with the values of the keys of [model], the size of the vocabulary, and
the published training settings.
"""

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

# Default values of keys that the presets of Narayanan et al. 2021 leave out.
DEFAULTS = {"seq_length": 2048, "vocab_size": 51200}
RECIPE = ("batch", "optimizer")  # sections whose keys a preset may set.
# Keys of [optimizer] that apply only to Adam.
ADAM = ("beta1", "beta2", "eps")
# A published warm-up is meant for a run of full length. In a shorter run the warm-up takes at most
# one tenth of the steps.
WARMUP_SHARE = 10
# Matches the number of parameters in the name of a model, such as 1.3b, 125m, 1t, 8x7b.
SIZE = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)([mbt])(?![a-z])")
UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
# The distance between two names is the sum of a distance between families, which is at most this
# number, and a distance between sizes. The distance between two sizes is the magnitude of the
# natural logarithm of their ratio.
FAMILY_WEIGHT = 3.0
# A preset whose name has no size has this distance to every size, as if the ratio were 10.
UNKNOWN_SIZE = math.log(10)


@cache
def _tables() -> dict[str, dict[str, Any]]:
    text = files("ptdmpi").joinpath("presets", "models.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def model_presets() -> dict[str, dict[str, Any]]:
    """Return all presets: name -> the values of all keys of [model], and `vocab_size`."""
    return {
        name: {**DEFAULTS, **{key: value for key, value in table.items() if key not in RECIPE}}
        for name, table in _tables().items()
    }


def nearest_presets(name: str, count: int = 2) -> list[str]:
    """Return the `count` presets whose model family and size are most similar to `name`, the most
    similar preset first.

    The name may come from a model hub. For example, "llama-7b" is similar to
    "meta-llama/Llama-2-7b-hf".
    """
    family, size = _family_and_size(name)

    def distance(preset: str) -> float:
        other, parameters = _family_and_size(preset)
        if not size:
            return 1 - difflib.SequenceMatcher(None, name.lower(), preset).ratio()
        likeness = difflib.SequenceMatcher(None, family, other).ratio()
        family_distance = FAMILY_WEIGHT * (1 - likeness)
        if not parameters:  # such as "deepseek-v3", whose name does not contain its size
            return family_distance + UNKNOWN_SIZE
        return family_distance + abs(math.log(size / parameters))

    return sorted(model_presets(), key=distance)[:count]


def _family_and_size(name: str) -> tuple[str, float]:
    """Split the name of a model, such as "llama2-7b". Return the part before the size, and the size
    as a number of parameters (0 if the name contains no size).
    """
    name = name.lower().rpartition("/")[-1]
    match = SIZE.search(name)
    if match is None:
        return re.sub(r"[^a-z0-9.]", "", name), 0.0
    experts, number, unit = match.groups()
    family = re.sub(r"[^a-z0-9.]", "", name[: match.start()])
    return family, int(experts or 1) * float(number) * UNITS[unit]


def recipe(name: str) -> dict[str, dict[str, Any]]:
    """Return the published training settings of a preset: the values of keys of [batch] and
    [optimizer], as section -> key -> value."""
    return {section: dict(_tables()[name].get(section, {})) for section in RECIPE}


def with_preset(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the tree of a configuration (nested dicts and lists) with the keys of a preset added.
    Keys that are already in the tree keep their values. The vocabulary size is not taken from the
    preset, because the data determines it. Raise KeyError for an unknown preset.
    """
    model, preset = dict(tree["model"]), model_presets()[name]
    model.pop("preset", None)
    sizes = {key: value for key, value in preset.items() if key != "vocab_size"}
    changed = {**tree, "model": {**sizes, **model}}
    for section, keys in recipe(name).items():
        own = tree.get(section, {})
        if isinstance(own, Mapping):
            changed[section] = {**_fitted(keys, own, tree), **own}
    return changed


def own_sizes(tree: Mapping[str, Any]) -> list[str]:
    """Return the keys of [model] whose value in the tree differs from the preset that the tree
    names. Return an empty list if the tree names no known preset.
    """
    model = tree.get("model")
    if not isinstance(model, Mapping):
        return []
    preset = model_presets().get(str(model.get("preset")), {})
    return [key for key, value in preset.items() if model.get(key, value) != value]


def _fitted(
    keys: dict[str, Any], own: Mapping[str, Any], tree: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of a recipe (published training settings) that fit the other keys of the run.
    The recipe's final learning rate is left out if the user sets the peak learning rate, and the
    settings of Adam are left out for another optimizer. The warm-up is shortened for a short run.
    """
    run = tree.get("run")
    steps = run.get("steps") if isinstance(run, Mapping) else None
    if "learning_rate" in own:
        keys.pop("min_learning_rate", None)
    if own.get("kind", "adamw") != "adamw":  # the papers give these settings only for Adam
        keys = {key: value for key, value in keys.items() if key not in ADAM}
    if "warmup_steps" in keys and type(steps) is int:
        keys["warmup_steps"] = min(keys["warmup_steps"], max(0, steps) // WARMUP_SHARE)
    return keys
