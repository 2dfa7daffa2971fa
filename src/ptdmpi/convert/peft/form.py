"""The names of `peft`'s files, and the modules of `transformers` that ptdmpi's adapters change."""

import contextlib
from pathlib import Path

from ptdmpi.config import InputError, ModelConfig
from ptdmpi.convert.adapters import AdapterPlace
from ptdmpi.convert.families import family_for
from ptdmpi.convert.family import Family, NumberedName
from ptdmpi.convert.folder import HUB_NAME

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."


def module_of(family: Family, place: AdapterPlace) -> str:
    """Return the name in `transformers`, without prefix, of the module that an adapter changes.
    Raise InputError if the family has no such module."""
    numbered = NumberedName.of(place.linear)
    theirs = family.modules.get(numbered.name, ())
    if not theirs:
        raise InputError(f"a {family.model_type} of Hugging Face has no {place.linear}")
    output = place.output if len(theirs) > 1 else 0
    return numbered.filled(theirs[output])


def is_fused(model: ModelConfig, place: AdapterPlace) -> bool:
    """Return True if one module of `transformers` has all outputs of ptdmpi's linear layer, and
    False if there is one module for each output."""
    family = family_for(model)
    return len(family.modules[NumberedName.of(place.linear).name]) == 1


def hub_name(base: Path) -> str:
    """Return the name that the model in the checkpoint `base` had on the Hugging Face hub before
    its conversion. Return the path itself if the model did not come from the hub."""
    for folder in (base, *base.parents[:2]):
        with contextlib.suppress(OSError):
            return (folder / HUB_NAME).read_text(encoding="utf-8", errors="replace").strip()
    return str(base)
