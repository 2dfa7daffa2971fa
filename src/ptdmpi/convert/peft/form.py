"""Which files `peft` writes, and beside which of its modules our adapters stand."""

from ptdmpi.config import InputError, ModelConfig
from ptdmpi.convert.adapters import AdapterPlace
from ptdmpi.convert.families import family_for
from ptdmpi.convert.family import Family

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


def module_of(family: Family, place: AdapterPlace) -> str:
    """Their module, without prefix. Raises InputError for one that the family has not."""
    layer, _, linear = place.linear.removeprefix("layers.").partition(".")
    theirs = family.modules.get(f"layers.{{i}}.{linear}", ())
    if not theirs:
        raise InputError(f"a {family.model_type} of Hugging Face has nothing like {place.linear}")
    return theirs[place.output if len(theirs) > 1 else 0].replace("{i}", layer)


def is_fused(model: ModelConfig, place: AdapterPlace) -> bool:
    """Whether their module has all outputs of our linear, and not each on its own."""
    family = family_for(model)
    return len(family.modules[f"layers.{{i}}.{place.linear.split('.', 2)[2]}"]) == 1
