"""Sliding windows of attention, converted from and to a config.json of Hugging Face."""

from typing import Any

from ptdmpi.config import InputError, ModelConfig
from ptdmpi.convert.family import ConfigJson


def window_keys(config: ConfigJson, sliding: list[bool]) -> dict[str, Any]:
    """Return the keys of [model] for sliding windows. `layer_types` in config.json says which
    layers have a window. If config.json has no `layer_types`, the layers for which `sliding` is
    True have a window. Raise InputError for values that are not supported."""
    window = config.values.get("sliding_window")
    types = config.get("layer_types")
    if types is not None:
        known = {"sliding_attention": True, "full_attention": False}
        if not isinstance(types, list) or not all(str(kind) in known for kind in types):
            raise InputError(
                f"{config.name}: layer_types = {types!r} is not supported; legal: a list of "
                f"{' or '.join(known)}"
            )
        sliding = [known[kind] for kind in types]
    if not window or not any(sliding):
        return {"sliding_window": 0}
    require_whole(config, "sliding_window", window)
    numbers = [layer for layer, slides in enumerate(sliding) if slides]
    layers: Any = numbers
    if all(sliding):
        layers = "all"
    elif sliding == [layer % 2 == 0 for layer in range(len(sliding))]:
        layers = "even"
    return {"sliding_window": window, "sliding_layers": layers}


def require_whole(config: ConfigJson, key: str, value: Any) -> int:
    """Return `value`. Raise InputError if the value is not an integer."""
    if type(value) is not int:
        raise InputError(f"{config.name}: {key} = {value!r} is not an integer")
    return value


def sliding_layers(model: ModelConfig) -> list[bool]:
    """Return one value for each layer: True if the layer has the attention window that [model]
    gives, otherwise False. A layer has the window even if the window is longer than a sample."""
    layers = range(model.layers)
    named = {"all": [True] * model.layers, "even": [layer % 2 == 0 for layer in layers]}
    if isinstance(model.sliding_layers, str):
        return named[model.sliding_layers]
    return [layer in model.sliding_layers for layer in layers]


def layer_types(model: ModelConfig) -> list[str]:
    """Return the value of `layer_types` in config.json."""
    kinds = {True: "sliding_attention", False: "full_attention"}
    return [kinds[slides and model.sliding_window > 0] for slides in sliding_layers(model)]


def layer_count(config: ConfigJson) -> int:
    """Return the number of layers. If config.json has an illegal number of layers, return 0,
    because another check reports the mistake."""
    layers = config.need("num_hidden_layers")
    return layers if type(layers) is int else 0
