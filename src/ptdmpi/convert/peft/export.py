"""Our adapters as files that `peft` reads."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ptdmpi.base.disk import write_whole
from ptdmpi.config import AdaptConfig, InputError, ModelConfig
from ptdmpi.convert.adapters import AdapterPlace, LoadedAdapter, load_adapter, places, size_of
from ptdmpi.convert.families import family_for
from ptdmpi.convert.family import Family
from ptdmpi.convert.folder import new_directory
from ptdmpi.convert.heads import head_names, with_task
from ptdmpi.convert.peft.form import CONFIG_FILE, PREFIX, WEIGHTS_FILE, is_fused, module_of
from ptdmpi.model.state import WEIGHTS
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.parameters import Linear


def export(source: Path, target: Path, kind: str = WEIGHTS) -> int:
    """Write the adapters that `source` names into the directory `target`; returns their elements.
    `kind` stands for their weights. Raises InputError; then there is no `target`."""
    adapter = load_adapter(source, kind)
    family = with_task(family_for(adapter.model), adapter.adapted.task)
    adapt, names = adapter.adapted.adapt, head_names(family, adapter.model)
    if not adapter.places:
        raise InputError(
            f"{source}: a head alone, without adapters, which `peft` has no form for; legal: the "
            "whole model, by `ptdmpi adapter merge` and `ptdmpi convert to-hf`"
        )
    found = {f"{PREFIX}{theirs}": adapter.tensors[name] for name, theirs in names.items()}
    ranks: dict[str, int] = {}
    for module, own in _by_module(family, adapter.model, adapt).items():
        if adapt.method == "lora":
            pairs = [place.low_rank(adapter.tensors) for place in own]
            a, b = _stacked(adapter.model, own, pairs)
            found[f"{PREFIX}{module}.lora_A.weight"] = a
            found[f"{PREFIX}{module}.lora_B.weight"] = b
            ranks[_ending(module)] = len(a)
        else:
            found[f"{PREFIX}{module}.ia3_l"] = _factors(adapter, own)
    config = _config(adapter, family, ranks)
    with new_directory(target) as folder:
        contiguous = {name: one.contiguous() for name, one in found.items()}
        save_file(contiguous, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        write_whole(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    return size_of(found)


def _by_module(
    family: Family, model: ModelConfig, adapt: AdaptConfig
) -> dict[str, list[AdapterPlace]]:
    """Our adapters by the full name of their module; those of one module side by side."""
    found: dict[str, list[AdapterPlace]] = {}
    for place in places(model, adapt):
        found.setdefault(family.full(module_of(family, place)), []).append(place)
    return found


def _outputs(model: ModelConfig, place: AdapterPlace) -> int:
    linear = parameters.layer(model)[place.linear.split(".", 2)[2]]
    assert isinstance(linear, Linear)
    return sum(linear.outputs)


def _stacked(
    model: ModelConfig, own: Sequence[AdapterPlace], pairs: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """One A and B for adapters of several outputs of one module of theirs."""
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
    """(IA)^3's as they have them: [outputs, 1] behind a linear, [1, inputs] in front of one."""
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
    adapt = adapter.adapted.adapt
    own = _by_module(family, adapter.model, adapt)
    short, first = _short(family, adapter.model), adapt.first_layer
    # its (IA)^3 knows layers by the names of their modules alone
    numbered = adapt.method == "ia3" and first > 0
    names = {one: _ending(one, numbered) if numbered else short[_ending(one)] for one in own}
    common: dict[str, Any] = {
        "base_model_name_or_path": adapter.adapted.base.path,
        "fan_in_fan_out": family.transposed,
        "inference_mode": True,
        "peft_type": {"lora": "LORA", "ia3": "IA3"}[adapt.method],
        "task_type": _task_type(adapter),
        "target_modules": sorted({*names.values()}),
    }
    if adapter.adapted.has_head:
        theirs = head_names(family, adapter.model).values()
        common["modules_to_save"] = sorted({family.base(one).partition(".")[0] for one in theirs})
    if adapt.method == "ia3":
        inner = {names[name] for name, some in own.items() if some[0].by_rows}
        return {**common, "feedforward_modules": sorted(inner)}
    other = {short[name]: rank for name, rank in ranks.items() if rank != adapt.rank}
    return {
        **common,
        "bias": "none",
        "r": adapt.rank,
        "lora_alpha": adapt.alpha,
        "lora_dropout": adapt.dropout,
        "layers_to_transform": [*range(first, adapter.model.layers)] if first else None,
        "rank_pattern": other,
        "alpha_pattern": {name: adapt.scale * rank for name, rank in other.items()},
    }


def _task_type(adapter: LoadedAdapter) -> str | None:
    """What `peft` calls that which the model is for; it knows no candidates."""
    kind = adapter.adapted.task.kind
    if kind == "none":
        return None if adapter.model.masked else "CAUSAL_LM"
    return "SEQ_CLS" if kind == "classification" else None


def _ending(name: str, numbered: bool = False) -> str:
    """A module's name behind the number of its layer, or from that on."""
    parts = name.split(".")
    number = next(n for n, one in enumerate(parts) if one.isdigit())
    return ".".join(parts[number + (not numbered) :])


def _short(family: Family, model: ModelConfig) -> dict[str, str]:
    """What `peft` is to call each module of a layer, by its ending: the last name, or, where two
    have the same (GPT-2's c_proj), the ending."""
    every = AdaptConfig.model_validate({"method": "lora", "targets": ("*",)})
    endings = {_ending(name) for name in _by_module(family, model, every)}
    last = [one.rpartition(".")[2] for one in endings]
    return {
        one: one if last.count(one.rpartition(".")[2]) > 1 else one.rpartition(".")[2]
        for one in endings
    }
