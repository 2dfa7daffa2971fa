"""Modules for multi-token prediction in the files of Hugging Face. In the files of DeepSeek-V3, the
modules have the layer numbers that follow the number of the model's last layer.

The functions in this file take tensor names without the prefix of the base model, such as "model.".
"""

import re
from collections.abc import Iterable, Mapping

from ptdmpi.config import InputError, ModelConfig
from ptdmpi.convert.family import AHEAD, Family
from ptdmpi.model.parameters import Declaration
from ptdmpi.plan.layer.ahead.modules import MODULES

LEFT_OUT = "without the modules for multi-token prediction"


def module_of(name: str, layers: int) -> int:
    """Return the number (from 0) of the module to which a tensor belongs in the files of a model
    with `layers` layers. The result is negative if the tensor belongs to no module."""
    layer = re.match(r"layers\.(\d+)\.", name)
    return int(layer[1]) - layers if layer else -1


def modules_in(names: Iterable[str], layers: int) -> int:
    """Return the number of modules in the files with the tensors `names`, of a model with `layers`
    layers."""
    return max((0, *(module_of(name, layers) + 1 for name in names)))


def depth_of(
    family: Family, model: ModelConfig, names: Iterable[str], where: str
) -> tuple[int, str]:
    """Return the value of `mtp_depth` for files with the tensors `names`, and a note for the user.
    `model` is the model that config.json describes, and `where` is the name of config.json.

    When `transformers` saves a model, it leaves out the modules, but config.json still has a key
    with the number of modules. So `mtp_depth` is 0 if the files have no modules, whatever this key
    says. Raise InputError if the files have more modules than config.json says.
    """
    said = model.mtp_depth
    there = modules_in(names, model.layers) if family.copies else said
    if there > said:
        raise InputError(
            f"{where}: {AHEAD} = {said}, but the files have layer {model.layers + there - 1} after "
            f"the model's {model.layers} layers; legal: {there}"
        )
    if said and not there:
        return 0, f"{LEFT_OUT}: {AHEAD} = {said}, but the files have none"
    return said, ""


def exported(needed: Mapping[str, Declaration], modules: int) -> tuple[dict[str, Declaration], str]:
    """Return the parameters of `needed` that are written to the files, and a note about the others.
    Modules for multi-token prediction are counted from 0, and the parameters of module number
    `modules` and of all later modules are left out."""
    written = {
        name: declaration
        for name, declaration in needed.items()
        if not name.startswith(f"{MODULES}.") or int(name.split(".")[1]) < modules
    }
    if len(written) == len(needed):
        return written, ""
    return written, LEFT_OUT if not modules else f"{LEFT_OUT} from number {modules + 1} on"
