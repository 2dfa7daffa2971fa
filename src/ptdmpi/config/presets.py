"""Models by name, as tables of keys of [model] and `vocab_size`, and how they were trained."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

# Values of the keys that the presets of Narayanan et al. 2021 leave out.
DEFAULTS = {"seq_length": 2048, "vocab_size": 51200}
RECIPE = ("batch", "optimizer")  # sections whose keys a preset may set
# A published warm-up is for a run of full length. In a shorter run it takes at most this share.
ADAM = ("beta1", "beta2", "eps")
WARMUP_SHARE = 10


@cache
def _tables() -> dict[str, dict[str, Any]]:
    text = files("ptdmpi").joinpath("presets", "models.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def model_presets() -> dict[str, dict[str, Any]]:
    """Return name -> complete table of keys of [model], and vocab_size."""
    return {
        name: {**DEFAULTS, **{key: value for key, value in table.items() if key not in RECIPE}}
        for name, table in _tables().items()
    }


def recipe(name: str) -> dict[str, dict[str, Any]]:
    """Return the keys of [batch] and [optimizer] that the source of a preset states."""
    return {section: dict(_tables()[name].get(section, {})) for section in RECIPE}


def with_preset(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the tree of a configuration with the keys of a preset written out; keys given in the
    tree override them. The vocabulary comes from the data. Raises KeyError for an unknown
    preset."""
    model, preset = dict(tree["model"]), model_presets()[name]
    model.pop("preset", None)
    sizes = {key: value for key, value in preset.items() if key != "vocab_size"}
    changed = {**tree, "model": {**sizes, **model}}
    for section, keys in recipe(name).items():
        own = tree.get(section, {})
        if isinstance(own, Mapping):
            changed[section] = {**_fitted(keys, own, tree), **own}
    return changed


def _fitted(
    keys: dict[str, Any], own: Mapping[str, Any], tree: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of a recipe that do not contradict other keys of the run. The end of the
    decay belongs to its peak, and the warm-up to the length of the run."""
    run = tree.get("run")
    steps = run.get("steps") if isinstance(run, Mapping) else None
    if "learning_rate" in own:
        keys.pop("min_learning_rate", None)
    if own.get("kind", "adamw") != "adamw":  # the sources have settings only for Adam
        keys = {key: value for key, value in keys.items() if key not in ADAM}
    if "warmup_steps" in keys and type(steps) is int:
        keys["warmup_steps"] = min(keys["warmup_steps"], max(0, steps) // WARMUP_SHARE)
    return keys
