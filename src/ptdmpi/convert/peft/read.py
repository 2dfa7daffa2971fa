"""What `peft` has saved as adapters of ours."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor

from ptdmpi.base.words import counted
from ptdmpi.checkpoint.base import base_at
from ptdmpi.config import AdaptConfig, InputError, ModelConfig, TaskConfig
from ptdmpi.config.adapt import targets_of
from ptdmpi.convert.adapters import (
    AdapterPlace,
    LoadedAdapter,
    places,
    size_of,
    whole_tensor,
    write_adapter,
)
from ptdmpi.convert.families import family_for
from ptdmpi.convert.family import Family
from ptdmpi.convert.heads import head_names, made_up, with_task
from ptdmpi.convert.peft.form import CONFIG_FILE, PREFIX, WEIGHTS_FILE, is_fused, module_of
from ptdmpi.convert.tensors import header_text, read_json
from ptdmpi.inference.stored import StoredModel, open_model
from ptdmpi.lineage.adapted import NO_TASK, Adapted
from ptdmpi.model.state import WEIGHTS, key
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.parameters import Linear

# What changes the product, or the base beneath it, and is not known here: legal is what does not.
LEGAL: dict[str, Sequence[Any]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "trainable_token_indices": (None,),
    # adapters that act behind some tokens only
    "alora_invocation_tokens": (None,),
    # PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA have other weights beneath them than the base has
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}


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
            told = ", ".join(map(repr, legal))
            raise InputError(f"{where}: {name} = {config[name]!r}; legal: {told}")
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
        module = family.full(module_of(family, place))
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
    outputs = {own, sum(linear.outputs)} if is_fused(model, place) else {own}
    for name in names:
        one = tensors.get(name)
        shape = [] if one is None else [*one.shape]
        if name.endswith("lora_A.weight"):
            fits, legal = len(shape) == 2 and shape[0] > 0 and shape[1] == linear.inputs, "inputs"
        elif name.endswith("lora_B.weight"):
            rank = len(tensors[names[0]])
            fits, legal = len(shape) == 2 and shape[0] in outputs and shape[1] == rank, "outputs"
        else:
            # the shape says what is multiplied: inputs (their feedforward_modules), or outputs
            shapes = [[1, linear.inputs]] if place.by_rows else [[n, 1] for n in outputs]
            fits, legal = shape in shapes, f"channels, as {shapes[0]},"
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
    alpha, usual = (_number(config, name, where) for name in ("lora_alpha", "r"))
    scale = alpha / usual
    modules = [first.removesuffix(".lora_A.weight") for _, (first, _) in own]
    alphas = _pattern(config, "alpha_pattern", modules, where)
    ranks = _pattern(config, "rank_pattern", modules, where)
    found: dict[str, Tensor] = {}
    for module, (place, (first, second)) in zip(modules, own, strict=True):
        a, b = tensors[first], _part(place, tensors[second])
        said = ranks.get(module, usual)
        if said != len(a):
            raise InputError(
                f"{where}: r or rank_pattern say rank {said:g} of {module}, and {first} has "
                f"{counted(len(a), 'row')}; legal: as many"
            )
        factor = alphas.get(module, alpha) / len(a) / scale
        padded_a, padded_b = a.new_zeros(rank, a.shape[1]), b.new_zeros(len(b), rank)
        padded_a[: len(a)], padded_b[:, : len(a)] = a, b if factor == 1.0 else b * factor
        found[f"{place.linear}.lora_{place.leaf}.a"] = padded_a
        found[f"{place.linear}.lora_{place.leaf}.b"] = padded_b
    dropout = _number({"lora_dropout": 0.0, **config}, "lora_dropout", where, least=0.0, below=1.0)
    told: dict[str, Any] = {"rank": rank, "alpha": scale * rank, "dropout": dropout}
    return AdaptConfig(method="lora", targets=targets, **told), found


def _pattern(
    config: Mapping[str, Any], name: str, modules: Sequence[str], where: str
) -> dict[str, float]:
    """What a table of theirs says of each module that it names: by the first of its keys that is a
    regular expression for the module's name, or for an end of that behind a dot, as
    `peft.utils.other.get_pattern_key` has it. Raises InputError for a key that names none."""
    table = config.get(name) or {}
    if not isinstance(table, dict):
        raise InputError(f"{where}: {name} = {table!r}; legal: a table of numbers")
    found: dict[str, float] = {}
    for pattern in table:
        value = _number(table, pattern, where)
        try:
            own = [one for one in modules if re.match(rf"(.*\.)?({pattern})$", one)]
        except re.error as error:
            raise InputError(
                f"{where}: {name}: {pattern!r}: {error}; legal: a regular expression"
            ) from None
        if not own:
            raise InputError(
                f"{where}: {name}: {pattern!r} names no module that has an adapter; legal: the "
                f"end of such a one's name, say {modules[0].rpartition('.')[2]!r}"
            )
        for module in own:
            found.setdefault(module, value)
    return found


def _number(
    table: Mapping[str, Any], name: str, where: str, least: float = 1e-9, below: float = math.inf
) -> float:
    """A number that their configuration has. Raises InputError for anything else."""
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < below:
        legal = "a number above 0" if below == math.inf else f"{least:g} to below {below:g}"
        raise InputError(f"{where}: {name} = {value!r}; legal: {legal}")
    return float(value)
