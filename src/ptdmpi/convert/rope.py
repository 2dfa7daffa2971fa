"""The keys of a Hugging Face config.json for rotary angles, plain and scaled."""

import math
from collections.abc import Mapping
from typing import Any

from ptdmpi.config import InputError, ModelConfig
from ptdmpi.convert.family import ConfigJson

# For each kind of scaled rotary angles, a table that maps Hugging Face's keys to ptdmpi's keys.
ROPE_NUMBERS = {
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_factor",
        "high_freq_factor": "rope_high_factor",
        "original_max_position_embeddings": "rope_original_length",
    },
    "yarn": {
        "factor": "rope_factor",
        "beta_slow": "rope_low_factor",
        "beta_fast": "rope_high_factor",
        "original_max_position_embeddings": "rope_original_length",
        "attention_factor": "rope_attention_factor",
    },
}


def rope_keys(config: ConfigJson) -> dict[str, Any]:
    """Return the keys of [model] for rotary angles. Newer files have the rotary keys in
    `rope_parameters`; older files have `rope_theta` at the top level, and `rope_scaling`. Raise
    InputError for rotary angles that are not supported."""
    scaling: dict[str, Any] = {}
    theta = config.get("rope_theta", 10000.0)
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key, {})
        if not isinstance(rope, Mapping):
            raise InputError(f"{config.name}: {key} = {rope!r} is not a JSON object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        partial = rope.get("partial_rotary_factor", 1.0)
        by_layer = any(isinstance(value, Mapping) for value in rope.values())
        known = kind == "default" or (isinstance(kind, str) and kind in ROPE_NUMBERS)
        whole = partial == 1.0 and rope.get("truncate", True) is True
        if not known or not whole or by_layer:
            raise InputError(
                f"{config.name}: {key} = {dict(rope)} is not supported; legal: "
                'rope_type "default", "llama3" or "yarn" on whole heads, without truncate = false'
            )
        if kind != "default":
            scaling = {"rope_scaling": kind, **_scaling(config, key, kind, rope)}
        theta = rope.get("rope_theta", theta)
    config.only("partial_rotary_factor", 1.0)
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise InputError(f"{config.name}: rope_theta = {theta!r} is not a number")
    return {**scaling, "rope_theta": float(theta)}


def _scaling(
    config: ConfigJson, key: str, kind: str, rope: Mapping[str, Any]
) -> dict[str, int | float]:
    """Return the keys of [model] for scaled rotary angles of the kind `kind`. `rope` is the table
    in config.json, and `key` is the name of this table. Raise InputError for a value that is not a
    number."""
    length = "original_max_position_embeddings"
    values: dict[str, Any] = {length: config.get("max_position_embeddings")}
    # These are the defaults of `transformers` for keys that `rope` does not have. In ptdmpi the
    # attention factor 0 means the factor of YaRN's paper.
    if kind == "yarn":
        values |= {"beta_slow": 1.0, "beta_fast": 32.0, "attention_factor": 0.0}
    values |= {name: value for name, value in rope.items() if value is not None}
    numbers: dict[str, int | float] = {}
    for name in (*ROPE_NUMBERS[kind], *({"mscale", "mscale_all_dim"} & values.keys())):
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{config.name}: {key}: {name} = {value!r} is not a number")
        numbers[name] = value if name == length else float(value)
    scaling = {ours: numbers[theirs] for theirs, ours in ROPE_NUMBERS[kind].items()}
    some, every = numbers.get("mscale"), numbers.get("mscale_all_dim")
    if kind == "yarn" and some and every and not scaling["rope_attention_factor"]:
        # if config.json has `mscale` and `mscale_all_dim`, the attention factor follows DeepSeek's
        # formula
        growth = 0.1 * math.log(max(1.0, numbers["factor"]))
        scaling["rope_attention_factor"] = (some * growth + 1.0) / (every * growth + 1.0)
    return scaling


def rope_config(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json for rotary angles. Both older and newer versions of
    `transformers` can read the returned keys."""
    scaling = None
    parameters: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling != "none":
        known = ROPE_NUMBERS[model.rope_scaling]
        numbers = {theirs: getattr(model, ours) for theirs, ours in known.items()}
        if not model.rope_attention_factor:
            numbers.pop("attention_factor", None)
        scaling = parameters = {"rope_type": model.rope_scaling, **numbers}
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {**parameters, "rope_theta": model.rope_theta},
    }
