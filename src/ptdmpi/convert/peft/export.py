"""Exporting adapters of ptdmpi to files that `peft` reads."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ptdmpi.base.disk import write_whole
from ptdmpi.config import AdaptConfig, InputError, ModelConfig
from ptdmpi.convert.adapters import (
    AdapterPlace,
    LoadedAdapter,
    load_adapter,
    own_template,
    places,
    size_of,
)
from ptdmpi.convert.families import family_for
from ptdmpi.convert.family import Family
from ptdmpi.convert.folder import new_directory
from ptdmpi.convert.heads import head_names, with_task
from ptdmpi.convert.peft.form import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    hub_name,
    is_fused,
    module_of,
)
from ptdmpi.data.chat_template import TEMPLATE
from ptdmpi.inference.stored import open_adapter
from ptdmpi.model.state import WEIGHTS
from ptdmpi.plan.layer.parts import Linear
from ptdmpi.plan.shape import parameters


def export(source: Path, target: Path, kind: str = WEIGHTS, base_name: str = "") -> tuple[int, str]:
    """Write the adapters at `source` into the directory `target`, with the chat template of the
    conversations on which the adapters were trained. Return the number of elements of all written
    tensors, and a note if the template is not found.

    The files contain `base_name`, the name or the path of the base model in `transformers`. If
    `base_name` is "" and the base was converted from a model of the hub, the files contain the name
    of that model on the hub. If `base_name` is "" and the base has another origin, the files
    contain the path of the base. `kind` selects the stored values that are exported: the trained
    weights of the adapters, or the moving average of the weights. Raise InputError for adapters
    that are missing or damaged, or that `peft` cannot represent; then `target` is not written.
    """
    adapter = load_adapter(source, kind)
    adapt = adapter.adapted.adapt
    family = with_task(family_for(adapter.model), adapter.adapted.task)
    if not adapter.places:
        raise InputError(
            f"{source}: has a head without adapters, which `peft` cannot represent; export the "
            "whole model with `ptdmpi adapter merge` and `ptdmpi convert to-hf`"
        )
    converted = {
        f"{PREFIX}{theirs}": adapter.tensors[name]
        for name, theirs in head_names(family, adapter.model).items()
    }
    ranks: dict[str, int] = {}
    for module, own in _by_module(family, adapter.model, adapt).items():
        if adapt.method == "lora":
            pairs = [place.low_rank(adapter.tensors) for place in own]
            a, b = _stacked(adapter.model, own, pairs)
            converted[f"{PREFIX}{module}.lora_A.weight"] = a
            converted[f"{PREFIX}{module}.lora_B.weight"] = b
            ranks[_ending(module)] = len(a)
        else:
            converted[f"{PREFIX}{module}.ia3_l"] = _factors(adapter, own)
    config = _config(adapter, family, ranks)
    if base_name:
        config["base_model_name_or_path"] = base_name
    template, note = own_template(open_adapter(source))
    with new_directory(target) as folder:
        if template is not None:
            shutil.copyfile(template, folder / TEMPLATE)
        contiguous = {name: values.contiguous() for name, values in converted.items()}
        save_file(contiguous, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        write_whole(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    return size_of(converted), note


def _by_module(
    family: Family, model: ModelConfig, adapt: AdaptConfig
) -> dict[str, list[AdapterPlace]]:
    """Return the positions of the adapters, grouped by the full names of their modules in
    `transformers`."""
    grouped: dict[str, list[AdapterPlace]] = {}
    for place in places(model, adapt):
        grouped.setdefault(family.full(module_of(family, place)), []).append(place)
    return grouped


def _outputs(model: ModelConfig, place: AdapterPlace) -> int:
    """Return the number of outputs of the linear layer that an adapter changes."""
    linear = parameters.layer(model)[place.linear.split(".", 2)[2]]
    assert isinstance(linear, Linear)
    return sum(linear.outputs)


def _stacked(
    model: ModelConfig, own: Sequence[AdapterPlace], pairs: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return one matrix A and one matrix B for the adapters `own`, which all change the same module
    of `transformers`. `pairs` has A and B of each adapter."""
    if not is_fused(model, own[0]) or len(pairs[0][1]) == _outputs(model, own[0]):
        return pairs[0]
    a = torch.cat([pair[0] for pair in pairs])
    b = a.new_zeros(_outputs(model, own[0]), len(a))
    column = 0
    for place, (_, part) in zip(own, pairs, strict=True):
        b[place.rows, column : column + part.shape[1]] = part
        column += part.shape[1]
    return a, b


def _factors(adapter: LoadedAdapter, own: Sequence[AdapterPlace]) -> Tensor:
    """Return the (IA)^3 factors of one module in the shape that `peft` uses. The shape is
    [outputs, 1] if the factors multiply the output of a linear layer, and [1, inputs] if they
    multiply its input."""
    first = own[0]
    if first.by_rows:
        return first.factors(adapter.tensors)[None]
    if not is_fused(adapter.model, first):
        return first.factors(adapter.tensors)[:, None]
    whole = torch.ones(_outputs(adapter.model, first))
    for place in own:
        whole[place.rows] = place.factors(adapter.tensors)
    return whole[:, None]


def _config(adapter: LoadedAdapter, family: Family, ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of adapter_config.json. `ranks` maps the ending of a module's name to the
    rank of its adapter."""
    adapt = adapter.adapted.adapt
    own = _by_module(family, adapter.model, adapt)
    short = _short(family, adapter.model)
    first = adapt.first_layer
    # for (IA)^3 the file has no key that selects layers, so the module names contain the layer
    # number
    if adapt.method == "ia3" and first > 0:
        names = {module: _ending(module, numbered=True) for module in own}
    else:
        names = {module: short[_ending(module)] for module in own}
    common: dict[str, Any] = {
        "base_model_name_or_path": hub_name(Path(adapter.adapted.base.path)),
        "fan_in_fan_out": family.transposed,
        "inference_mode": True,
        "peft_type": {"lora": "LORA", "ia3": "IA3"}[adapt.method],
        "task_type": _task_type(adapter),
        "target_modules": sorted({*names.values()}),
    }
    if adapter.adapted.has_head:
        heads = map(family.base, head_names(family, adapter.model).values())
        common["modules_to_save"] = sorted({head.partition(".")[0] for head in heads})
    if adapt.method == "ia3":
        inner = {names[module] for module, places in own.items() if places[0].by_rows}
        return {**common, "feedforward_modules": sorted(inner)}
    other = {short[name]: rank for name, rank in ranks.items() if rank != adapt.rank}
    layers = [*range(first, adapter.model.layers)]
    return {
        **common,
        "bias": "none",
        "r": adapt.rank,
        "lora_alpha": adapt.alpha,
        "lora_dropout": adapt.dropout,
        "layers_to_transform": layers if first else None,
        "rank_pattern": other,
        "alpha_pattern": {name: adapt.scale * rank for name, rank in other.items()},
    }


def _task_type(adapter: LoadedAdapter) -> str | None:
    """Return the name that `peft` uses for the model's task. Return None for masked language models
    and for multiple choice, because `peft` has no names for these tasks."""
    kind = adapter.adapted.task.kind
    if kind == "classification":
        return "SEQ_CLS"
    if kind == "none" and not adapter.model.masked:
        return "CAUSAL_LM"
    return None


def _ending(name: str, numbered: bool = False) -> str:
    """Return the part of a module's name that follows the layer number. If `numbered` is True, the
    returned part includes the layer number."""
    parts = name.split(".")
    number = next(n for n, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[number + (not numbered) :])


def _short(family: Family, model: ModelConfig) -> dict[str, str]:
    """Return a table that maps each module of a layer to the short name by which `peft` finds the
    module. The keys are the endings of the module names: the parts after the layer number.

    The short name is the last part of the ending, or the full ending if two modules share that part
    (GPT-2's c_proj). The modules of all experts of a layer count as one module.
    """
    every = AdaptConfig.model_validate({"method": "lora", "targets": ("*",)})
    leaves: dict[str, list[str]] = {}
    for ending in {_ending(name) for name in _by_module(family, model, every)}:
        leaves.setdefault(ending.rpartition(".")[2], []).append(ending)
    short = {}
    for leaf, endings in leaves.items():
        kinds = {re.sub(r"\d+", "", ending) for ending in endings}
        for ending in endings:
            short[ending] = leaf if len(kinds) == 1 else ending
    return short
