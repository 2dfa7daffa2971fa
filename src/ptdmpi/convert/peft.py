"""Adapters in the format of the `peft` package, both ways: adapter_model.safetensors with
adapter_config.json.

Its modules are those of `transformers`, whose linears may be several of ours side by side (GPT-2's
c_attn). Ours beside such a one become one of their ranks together, B block by block; back, each of
ours has all of A and its rows of B.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ptdmpi.base.disk import write_whole
from ptdmpi.base.words import counted
from ptdmpi.checkpoint.base import base_at
from ptdmpi.config import AdaptConfig, InputError, ModelConfig, TaskConfig
from ptdmpi.config.adapt import targets_of
from ptdmpi.convert.adapters import (
    AdapterPlace,
    LoadedAdapter,
    load_adapter,
    places,
    size_of,
    whole_tensor,
    write_adapter,
)
from ptdmpi.convert.families import family_for
from ptdmpi.convert.family import Family
from ptdmpi.convert.folder import new_directory
from ptdmpi.convert.heads import head_names, made_up, with_task
from ptdmpi.convert.tensors import header_text, read_json
from ptdmpi.inference.stored import StoredModel, open_model
from ptdmpi.lineage.adapted import NO_TASK, Adapted
from ptdmpi.model.state import WEIGHTS, key
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.parameters import Linear

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
# What changes the product, and is not known here: legal is what does not.
LEGAL: dict[str, Sequence[Any]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "trainable_token_indices": (None,),
}


def export(source: Path, target: Path) -> int:
    """Write the adapters that `source` names into the directory `target`; returns their elements.
    Raises InputError; then there is no `target`."""
    adapter = load_adapter(source)
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
    where = str(source / CONFIG_FILE)
    for name, legal in LEGAL.items():
        if config.get(name, legal[0]) not in legal:
            raise InputError(f"{where}: {name} = {config[name]!r}; legal: {legal[0]!r}")
    model, task = _with_head(stored, config, tensors, where)
    head = _head(stored, with_task(family_for(model), task), model, tensors)
    adapt, found = _own(config, tensors, model, where)
    adapt = adapt.model_copy(update={"base": str(directory)})
    adapter = LoadedAdapter(Adapted(adapt, known, task), model, found | head)
    write_adapter(target, adapter)
    return size_of(adapter.tensors)


def _with_head(
    stored: StoredModel, config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str
) -> tuple[ModelConfig, TaskConfig]:
    """The model beneath with the head for a task that their file brings, and the task: that of the
    model, or classes without names. Raises InputError for anything else that was trained."""
    whole = stored.config()
    task = stored.task if whole.model.classifies else NO_TASK
    (linear,) = {name for _, name in family_for(whole.model).tasks.values()}
    known = {"classifier", "score", "pooler"}  # `peft` names both of its own accord
    if strange := sorted({*(config.get("modules_to_save") or ())} - known):
        raise InputError(
            f"{where}: modules_to_save = {strange}; legal: None, or a head for a task: {linear!r}"
        )
    if (rows := tensors.get(f"{linear}.weight")) is not None:
        count = len(rows)
        if task.kind == "none" and count > 1:
            task = TaskConfig(kind="classification", labels=tuple(made_up(count)))
        if task.classes != count or task.kind == "none":
            raise InputError(
                f"{where}: {linear}.weight has {counted(count, 'row')}; legal: "
                f"{task.classes or 'two or more'}, as many as the model has classes"
            )
    return whole.model_copy(update={"task": task}).with_head().model, task


def _head(
    stored: StoredModel, family: Family, model: ModelConfig, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The head's weights, taken out of their `tensors`; what did not train is the base's. Raises
    InputError for what neither has."""
    found, shapes = {}, parameters.task_head(model)
    with stored.reader() as reader:
        for name, theirs in head_names(family, model).items():
            held = tensors.pop(theirs, None)
            if held is None:
                reader.require(key(WEIGHTS, name), shapes[name])
                held = whole_tensor(reader, key(WEIGHTS, name))
            elif held.shape != shapes[name]:
                raise InputError(
                    f"{theirs} has shape {[*held.shape]}, and the model makes {[*shapes[name]]}"
                )
            found[name] = held
    return found


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
    first = min(place.layer for place, _ in own)
    if len(own) != len(targets) * (model.layers - first):
        raise InputError(
            f"{where}: not all layers from {first} to the last, {model.layers - 1}, have adapters "
            "of the same linears"
        )
    if method == "ia3":
        adapt = AdaptConfig(method="ia3", targets=targets)
        found = {
            f"{place.linear}.ia3_{place.leaf}.weight": _part(place, tensors[names[0]].flatten())
            for place, names in own
        }
    else:
        adapt, found = _low_rank(config, tensors, own, targets, where)
    usual = targets_of(AdaptConfig(method=method), model.gates).keys() == set(targets)
    # as a run says it that goes on with them
    told: dict[str, Any] = {"first_layer": first, **({"targets": "all"} if usual else {})}
    return adapt.model_copy(update=told), found


def _found(
    family: Family, model: ModelConfig, every: AdaptConfig, tensors: Mapping[str, Tensor], kind: str
) -> Iterator[tuple[AdapterPlace, list[str]]]:
    """Our adapters that their file has, with the names of its tensors."""
    ends = ("lora_A.weight", "lora_B.weight") if kind == "lora" else ("ia3_l",)
    for place in places(model, every):
        module = family.full(_module(family, place))
        names = [f"{module}.{end}" for end in ends]
        if names[0] in tensors:
            _require_fit(model, place, tensors, names)
            yield place, names


def _require_fit(
    model: ModelConfig, place: AdapterPlace, tensors: Mapping[str, Tensor], names: Sequence[str]
) -> None:
    """Raises InputError unless the tensors of an adapter are those of its place in the model."""
    linear = parameters.layer(model)[place.linear.split(".", 2)[2]]
    assert isinstance(linear, Linear)
    own = place.rows.stop - place.rows.start
    outputs = {own, sum(linear.outputs)} if _is_fused(model, place) else {own}
    for name in names:
        one = tensors.get(name)
        shape = [] if one is None else [*one.shape]
        if name.endswith("lora_A.weight"):
            fits, legal = len(shape) == 2 and shape[0] > 0 and shape[1] == linear.inputs, "inputs"
        elif name.endswith("lora_B.weight"):
            rank = len(tensors[names[0]])
            fits, legal = len(shape) == 2 and shape[0] in outputs and shape[1] == rank, "outputs"
        else:
            sizes = {linear.inputs} if place.by_rows else outputs
            fits, legal = one is not None and one.numel() in sizes, "channels"
        if not fits:
            found = "is missing" if one is None else f"has shape {shape}"
            raise InputError(
                f"{name} {found}: not that of this model, whose {place.linear} has "
                f"{linear.inputs} inputs and {own} outputs; legal: the {legal} of its base"
            )


def _part(place: AdapterPlace, whole: Tensor) -> Tensor:
    """Rows of a tensor of theirs that are of one output of ours, where it has all outputs."""
    size = place.rows.stop - place.rows.start
    return whole if place.by_rows or len(whole) == size else whole[place.rows]


def _low_rank(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    own: Sequence[tuple[AdapterPlace, Sequence[str]]],
    targets: tuple[str, ...],
    where: str,
) -> tuple[AdaptConfig, dict[str, Tensor]]:
    """All of one rank: those of a lower one are padded, and what their scales differ in is in B."""
    rank = max(len(tensors[names[0]]) for _, names in own)
    scale = _number(config, "lora_alpha", where) / _number(config, "r", where)
    known = config.get("alpha_pattern") or {}
    if not isinstance(known, dict):
        raise InputError(f"{where}: alpha_pattern = {known!r}; legal: a table of numbers")
    found: dict[str, Tensor] = {}
    for place, (first, second) in own:
        a, b = tensors[first], _part(place, tensors[second])
        module = first.removesuffix(".lora_A.weight")
        own_alpha = (name for name in known if f".{module}".endswith(f".{name}"))
        table = {"lora_alpha": config["lora_alpha"], **known}
        factor = _number(table, next(own_alpha, "lora_alpha"), where) / len(a) / scale
        padded_a, padded_b = a.new_zeros(rank, a.shape[1]), b.new_zeros(len(b), rank)
        padded_a[: len(a)], padded_b[:, : len(a)] = a, b if factor == 1.0 else b * factor
        found[f"{place.linear}.lora_{place.leaf}.a"] = padded_a
        found[f"{place.linear}.lora_{place.leaf}.b"] = padded_b
    dropout = _number({"lora_dropout": 0.0, **config}, "lora_dropout", where, least=0.0, below=1.0)
    told: dict[str, Any] = {"rank": rank, "alpha": scale * rank, "dropout": dropout}
    return AdaptConfig(method="lora", targets=targets, **told), found


def _number(
    table: Mapping[str, Any], name: str, where: str, least: float = 1e-9, below: float = math.inf
) -> float:
    """A number that their configuration has. Raises InputError for anything else."""
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < below:
        legal = "a number above 0" if below == math.inf else f"{least:g} to below {below:g}"
        raise InputError(f"{where}: {name} = {value!r}; legal: {legal}")
    return float(value)
