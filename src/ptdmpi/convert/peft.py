"""Adapters in the format of the `peft` package, both ways: adapter_model.safetensors with
adapter_config.json.

Its modules are those of `transformers`, whose linears may be several of ours side by side (GPT-2's
c_attn). Ours beside such a one become one of their ranks together, B block by block; back, each of
ours has all of A and its rows of B.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ptdmpi.base.disk import write_whole
from ptdmpi.checkpoint.base import base_at
from ptdmpi.config import AdaptConfig, InputError, ModelConfig
from ptdmpi.config.adapt import targets_of
from ptdmpi.convert.adapters import (
    AdapterPlace,
    LoadedAdapter,
    load_adapter,
    places,
    size_of,
    write_adapter,
)
from ptdmpi.convert.families import family_for
from ptdmpi.convert.family import Family
from ptdmpi.convert.folder import new_directory
from ptdmpi.convert.tensors import header_text, read_json
from ptdmpi.inference.stored import open_model
from ptdmpi.lineage.adapted import Adapted
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.parameters import Linear

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
# What changes the product, and is not known here: legal is what does not.
LEGAL: dict[str, Sequence[Any]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "modules_to_save": (None, []),
    "layers_to_transform": (None,),
    "trainable_token_indices": (None,),
}


def export(source: Path, target: Path) -> int:
    """Write the adapters that `source` names into the directory `target`; returns their elements.
    Raises InputError; then there is no `target`."""
    adapter = load_adapter(source)
    family, adapt = family_for(adapter.model), adapter.adapted.adapt
    found: dict[str, Tensor] = {}
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
        found.setdefault(family.full(_module(family, place)), []).append(place)
    return found


def _module(family: Family, place: AdapterPlace) -> str:
    """Their module, without prefix. Raises InputError for one that the family has not."""
    layer, _, linear = place.linear.removeprefix("layers.").partition(".")
    theirs = family.modules.get(f"layers.{{i}}.{linear}", ())
    if not theirs:
        raise InputError(f"a {family.model_type} of Hugging Face has nothing like {place.linear}")
    return theirs[place.output if len(theirs) > 1 else 0].replace("{i}", layer)


def _outputs(model: ModelConfig, place: AdapterPlace) -> int:
    linear = parameters.layer(model)[place.linear.split(".", 2)[2]]
    assert isinstance(linear, Linear)
    return sum(linear.outputs)


def _stacked(
    model: ModelConfig, own: Sequence[AdapterPlace], pairs: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """One A and B for adapters of several outputs of one module of theirs."""
    if not _is_fused(model, own[0]) or len(pairs[0][1]) == _outputs(model, own[0]):
        return pairs[0]
    a = torch.cat([pair[0] for pair in pairs])
    b = a.new_zeros(_outputs(model, own[0]), len(a))
    column = 0
    for place, (_, part) in zip(own, pairs, strict=True):
        b[place.rows, column : column + part.shape[1]] = part
        column += part.shape[1]
    return a, b


def _is_fused(model: ModelConfig, place: AdapterPlace) -> bool:
    """Whether their module has all outputs of our linear, and not each on its own."""
    family = family_for(model)
    return len(family.modules[f"layers.{{i}}.{place.linear.split('.', 2)[2]}"]) == 1


def _factors(adapter: LoadedAdapter, own: Sequence[AdapterPlace]) -> Tensor:
    """(IA)^3's as they have them: [outputs, 1] behind a linear, [1, inputs] in front of one."""
    first = own[0]
    if first.by_rows:
        return first.factors(adapter.tensors)[None]
    if not _is_fused(adapter.model, first):
        return first.factors(adapter.tensors)[:, None]
    whole = torch.ones(_outputs(adapter.model, first))
    for place in own:
        whole[place.rows] = place.factors(adapter.tensors)
    return whole[:, None]


def _config(adapter: LoadedAdapter, family: Family, ranks: Mapping[str, int]) -> dict[str, Any]:
    adapt = adapter.adapted.adapt
    own = _by_module(family, adapter.model, adapt)
    short = _short(family, adapter.model)
    common: dict[str, Any] = {
        "base_model_name_or_path": adapter.adapted.base.path,
        "fan_in_fan_out": family.transposed,
        "inference_mode": True,
        "peft_type": {"lora": "LORA", "ia3": "IA3"}[adapt.method],
        "task_type": None if adapter.model.masked else "CAUSAL_LM",
        "target_modules": sorted({short[_ending(name)] for name in own}),
    }
    if adapt.method == "ia3":
        inner = {short[_ending(name)] for name, some in own.items() if some[0].by_rows}
        return {**common, "feedforward_modules": sorted(inner)}
    other = {short[name]: rank for name, rank in ranks.items() if rank != adapt.rank}
    return {
        **common,
        "bias": "none",
        "r": adapt.rank,
        "lora_alpha": adapt.alpha,
        "lora_dropout": adapt.dropout,
        "rank_pattern": other,
        "alpha_pattern": {name: adapt.scale * rank for name, rank in other.items()},
    }


def _ending(name: str) -> str:
    """A module's name behind the number of its layer."""
    parts = name.split(".")
    return ".".join(parts[next(n for n, one in enumerate(parts) if one.isdigit()) + 1 :])


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


# -- back ------------------------------------------------------------------------------------------


def import_peft(source: Path, base: Path, target: Path) -> int:
    """Write what the `peft` directory `source` holds beside the model at `base` as a checkpoint of
    adapters at `target`; returns its elements. Raises InputError; then there is no `target`."""
    config = read_json(source / CONFIG_FILE)
    header_text(source / WEIGHTS_FILE)  # which finds damage
    tensors = {
        name.removeprefix(PREFIX): one.float()
        for name, one in load_file(source / WEIGHTS_FILE).items()
    }
    stored = open_model(base)
    directory, known = base_at(base)
    model, where = stored.config().model, str(source / CONFIG_FILE)
    for name, legal in LEGAL.items():
        if config.get(name, legal[0]) not in legal:
            raise InputError(f"{where}: {name} = {config[name]!r}; legal: {legal[0]!r}")
    adapt, found = _own(config, tensors, model, where)
    adapt = adapt.model_copy(update={"base": str(directory)})
    adapter = LoadedAdapter(Adapted(adapt, replace(known)), model, found)
    write_adapter(target, adapter)
    return size_of(found)


def _own(
    config: Mapping[str, Any], tensors: dict[str, Tensor], model: ModelConfig, where: str
) -> tuple[AdaptConfig, dict[str, Tensor]]:
    kinds: dict[str, Literal["lora", "ia3"]] = {"LORA": "lora", "IA3": "ia3"}
    method = kinds.get(str(config.get("peft_type")))
    if method is None:
        raise InputError(
            f"{where}: peft_type = {config.get('peft_type')!r}; legal: 'LORA' or 'IA3'"
        )
    family = family_for(model)
    every = AdaptConfig.model_validate({"method": method, "targets": ("*",)})
    own = list(_found(family, model, every, tensors, method))
    left = tensors.keys() - {name for *_, names in own for name in names}
    if left or not own:
        strange = min(left) if left else "nothing"
        raise InputError(f"{where}: {strange} is beside no linear of a layer of this model")
    targets = tuple(dict.fromkeys(place.target for place, _ in own))
    if len(own) != len(targets) * model.layers:
        raise InputError(f"{where}: not all layers have adapters of the same linears")
    if method == "ia3":
        adapt = AdaptConfig(method="ia3", targets=targets)
        found = {
            f"{place.linear}.ia3_{place.leaf}.weight": _part(place, tensors[names[0]].flatten())
            for place, names in own
        }
    else:
        adapt, found = _low_rank(config, tensors, own, targets)
    usual = targets_of(AdaptConfig(method=method), model.gates).keys() == set(targets)
    # as a run says it that goes on with them
    return (adapt.model_copy(update={"targets": "all"}) if usual else adapt), found


def _found(
    family: Family, model: ModelConfig, every: AdaptConfig, tensors: Mapping[str, Tensor], kind: str
) -> Iterator[tuple[AdapterPlace, list[str]]]:
    """Our adapters that their file has, with the names of its tensors."""
    ends = ("lora_A.weight", "lora_B.weight") if kind == "lora" else ("ia3_l",)
    for place in places(model, every):
        module = family.full(_module(family, place))
        names = [f"{module}.{end}" for end in ends]
        if names[0] in tensors:
            yield place, names


def _part(place: AdapterPlace, whole: Tensor) -> Tensor:
    """Rows of a tensor of theirs that are of one output of ours, where it has all outputs."""
    size = place.rows.stop - place.rows.start
    return whole if place.by_rows or len(whole) == size else whole[place.rows]


def _low_rank(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    own: Sequence[tuple[AdapterPlace, Sequence[str]]],
    targets: tuple[str, ...],
) -> tuple[AdaptConfig, dict[str, Tensor]]:
    """All of one rank: those of a lower one are padded, and what their scales differ in is in B."""
    rank = max(len(tensors[names[0]]) for _, names in own)
    scale = config["lora_alpha"] / config["r"]
    found: dict[str, Tensor] = {}
    for place, (first, second) in own:
        a, b = tensors[first], _part(place, tensors[second])
        module, known = first.removesuffix(".lora_A.weight"), config.get("alpha_pattern") or {}
        own_alpha = (known[name] for name in known if f".{module}".endswith(f".{name}"))
        alpha = next(own_alpha, config["lora_alpha"])
        factor = alpha / len(a) / scale
        padded_a, padded_b = a.new_zeros(rank, a.shape[1]), b.new_zeros(len(b), rank)
        padded_a[: len(a)], padded_b[:, : len(a)] = a, b if factor == 1.0 else b * factor
        found[f"{place.linear}.lora_{place.leaf}.a"] = padded_a
        found[f"{place.linear}.lora_{place.leaf}.b"] = padded_b
    told = {"rank": rank, "alpha": scale * rank, "dropout": config.get("lora_dropout", 0.0)}
    return AdaptConfig(method="lora", targets=targets, **told), found
