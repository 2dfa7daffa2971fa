"""Importing adapters that were saved by `peft`."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor

from ptdmpi.base.hub import is_hub_name
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
from ptdmpi.convert.peft.form import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    hub_name,
    is_fused,
    module_of,
)
from ptdmpi.convert.tensors import header_text, read_json
from ptdmpi.data.chat_template import TEMPLATE
from ptdmpi.inference.stored import StoredModel, open_model
from ptdmpi.lineage.adapted import NO_TASK, Adapted
from ptdmpi.model.state import WEIGHTS, key
from ptdmpi.plan.layer.parts import Linear
from ptdmpi.plan.shape import parameters

# The files of an adapter on the hub that are downloaded.
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, TEMPLATE)
# Options of `peft` that change the forward pass or the base model. ptdmpi supports only these
# values of the options.
LEGAL: dict[str, Sequence[Any]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "trainable_token_indices": (None,),
    # with this option, adapters would act only after certain tokens
    "alora_invocation_tokens": (None,),
    # other values (PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA) change the weights of the base model
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}


# Python matches regular expressions by backtracking. A pattern with a repeated group may match a
# name in exponentially many ways, and a pattern with n repeated characters may match a name of L
# characters in L^n ways. So a pattern is refused if SLOW matches a part of it, or if REPEAT matches
# more than MOST_REPEATS parts.
SLOW = re.compile(r"\)[*+{]")
REPEAT = re.compile(r"[*+{]")
MOST_REPEATS = 3
MOST_NUMBER = 1e30  # a greater number in a configuration is a mistake


def import_peft(source: Path, base: Path, target: Path) -> int:
    """Import the adapters in the `peft` directory `source`: write them as a checkpoint at `target`.
    The adapters belong to the model at `base`. A chat template in `source` is copied. Return the
    number of elements of all written tensors.

    Raise InputError if a directory is missing or damaged, or if the adapters are not supported or
    do not fit the model; then `target` is not written.
    """
    config = read_json(source / CONFIG_FILE)
    # this call checks the file: it raises InputError if the file is damaged
    header_text(source / WEIGHTS_FILE)
    tensors = {
        name.removeprefix(PREFIX): values.float()
        for name, values in load_file(source / WEIGHTS_FILE).items()
    }
    stored = open_model(base)
    directory, origin = base_at(base)
    where = str(source / CONFIG_FILE)
    _require_same_base(config, directory, where)
    for name, legal in LEGAL.items():
        if config.get(name, legal[0]) not in legal:
            shown = ", ".join(map(repr, legal))
            raise InputError(f"{where}: {name} = {config[name]!r}; legal: {shown}")
    model, task = _with_head(stored, config, tensors, where)
    head = _head(stored, with_task(family_for(model), task), model, tensors)
    adapt, own = _own(config, tensors, model, where)
    adapt = adapt.model_copy(update={"base": str(directory)})
    adapter = LoadedAdapter(Adapted(adapt, origin, task), model, own | head)
    template = source / TEMPLATE
    write_adapter(target, adapter, template if template.is_file() else None)
    return size_of(adapter.tensors)


def _require_same_base(config: Mapping[str, Any], base: Path, where: str) -> None:
    """Raise InputError if the adapters name one model of the hub, but the base model was converted
    from another model of the hub."""
    theirs, ours = config.get("base_model_name_or_path"), hub_name(base)
    if isinstance(theirs, str) and is_hub_name(theirs) and is_hub_name(ours) and theirs != ours:
        raise InputError(
            f"{where}: base_model_name_or_path = {theirs}, but {base} was converted from {ours}; "
            f"legal: the result of ptdmpi convert from-hf {theirs}"
        )


def _with_head(
    stored: StoredModel, config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str
) -> tuple[ModelConfig, TaskConfig]:
    """Return two values. The first value is the section [model] of the base model with the task
    head that the file contains. The second value is the task.

    The task is the base model's task. If the base model has no task, the task is a classification
    with default class names. Raise InputError if other modules were trained, or if the head does
    not fit the task.
    """
    whole = stored.config()
    task = stored.task if whole.model.classifies else NO_TASK
    (linear,) = {name for _, name in family_for(whole.model).tasks.values()}
    # `peft` also writes the first two of these names if the user has not set any names
    known = {"classifier", "score", "pooler"}
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list):
        saved = [saved]
    if strange := sorted({*map(str, saved)} - known):
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
    """Remove the head's weights from `tensors` and return them. Weights that the file does not
    contain are taken from the base model. Raise InputError for a weight of a wrong shape, or for a
    weight that neither the file nor the base model contains."""
    head = {}
    shapes = parameters.task_head(model)
    with stored.reader() as reader:
        for name, theirs in head_names(family, model).items():
            weight = tensors.pop(theirs, None)
            if weight is None:
                reader.require(key(WEIGHTS, name), shapes[name])
                weight = whole_tensor(reader, key(WEIGHTS, name))
            elif weight.shape != shapes[name]:
                raise InputError(
                    f"{theirs} has shape {[*weight.shape]}, but the model needs {[*shapes[name]]}"
                )
            head[name] = weight
    return head


@dataclass(frozen=True)
class _Module:
    """A module of `transformers` with an adapter. `place` is the position of the adapter in
    ptdmpi's model. `names` are the names of the adapter's tensors: A and B, or the (IA)^3
    factors."""

    place: AdapterPlace
    names: Sequence[str]


def _own(
    config: Mapping[str, Any], tensors: dict[str, Tensor], model: ModelConfig, where: str
) -> tuple[AdaptConfig, dict[str, Tensor]]:
    """Return the section [adapt], without the key `base`, and the tensors of the adapters under
    ptdmpi's names. Raise InputError for adapters that are not supported, or that do not fit the
    model."""
    kinds: dict[str, Literal["lora", "ia3"]] = {"LORA": "lora", "IA3": "ia3"}
    method = kinds.get(str(config.get("peft_type")))
    if method is None:
        raise InputError(
            f"{where}: peft_type = {config.get('peft_type')!r}; legal: 'LORA' or 'IA3'"
        )
    own = list(_modules(model, tensors, method))
    left = tensors.keys() - {name for module in own for name in module.names}
    if left:
        raise InputError(
            f"{where}: {min(left)} does not belong to a linear in the layers of this model"
        )
    if not own:
        raise InputError(f"{where}: has no adapter for a linear in the layers of this model")
    own = _without_idle(own, tensors)
    targets = tuple(dict.fromkeys(module.place.target for module in own))
    first = min(module.place.layer for module in own)
    # with these keys of [adapt], a run can continue to train the imported adapters
    common: dict[str, Any] = {"method": method, "targets": targets, "first_layer": first}
    if len(own) != len(list(places(model, AdaptConfig().model_copy(update=common)))):
        raise InputError(
            f"{where}: not all layers from {first} to the last, {model.layers - 1}, have adapters "
            "of the same linears"
        )
    if targets_of(AdaptConfig(method=method), model.gates, model.mlps).keys() == set(targets):
        common["targets"] = "all"
    if method == "ia3":
        return AdaptConfig(method="ia3").model_copy(update=common), _scaled(tensors, own)
    low_rank, ours = _low_rank(config, tensors, own, where)
    return AdaptConfig(method="lora", **low_rank).model_copy(update=common), ours


def _without_idle(own: Sequence[_Module], tensors: Mapping[str, Tensor]) -> list[_Module]:
    """Return the modules without those for idle targets, because an idle target needs no adapter in
    ptdmpi. A module of `transformers`, such as c_attn, may contain several targets of ptdmpi
    (queries, keys and values), but an adapter of this module need not change all of them. A target
    is idle if the adapters change nothing at this target in any layer, but change another target of
    the same linear layer."""
    changes: dict[str, dict[str, bool]] = {}
    for module in own:
        by_target = changes.setdefault(module.place.linear.split(".", 2)[2], {})
        whole = tensors[module.names[-1]]
        part = _part(module.place, whole)
        nothing = 1.0 if module.names[-1].endswith("ia3_l") else 0.0
        changed = len(part) == len(whole) or bool((part != nothing).any())
        by_target[module.place.target] = by_target.get(module.place.target, False) or changed
    idle = {
        target
        for by_target in changes.values()
        for target, changed in by_target.items()
        if not changed and any(by_target.values())
    }
    return [module for module in own if module.place.target not in idle]


def _used(module: _Module, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the matrices A and B of one adapter. If ptdmpi exported several adapters of a module
    together, the matrix A in the file has the rows of all these adapters. Return only the rows of A
    and the columns of B that belong to this adapter."""
    a, whole = (tensors[name] for name in module.names)
    b = _part(module.place, whole)
    used = b.any(0)
    if len(b) < len(whole) and used.any():
        return a[used], b[:, used]
    return a, b


def _scaled(tensors: Mapping[str, Tensor], own: Sequence[_Module]) -> dict[str, Tensor]:
    """Return the factors of (IA)^3 under ptdmpi's names."""
    ours = {}
    for module in own:
        factors = _part(module.place, tensors[module.names[0]].flatten())
        ours[f"{module.place.linear}.ia3_{module.place.leaf}.weight"] = factors
    return ours


def _modules(
    model: ModelConfig, tensors: Mapping[str, Tensor], method: Literal["lora", "ia3"]
) -> Iterator[_Module]:
    """Yield the modules that have adapters of the kind `method` among the file's `tensors`. Raise
    InputError for an adapter that does not fit the model."""
    family = family_for(model)
    every = AdaptConfig.model_validate({"method": method, "targets": ("*",)})
    ends = ("lora_A.weight", "lora_B.weight") if method == "lora" else ("ia3_l",)
    for place in places(model, every):
        module = family.full(module_of(family, place))
        names = [f"{module}.{end}" for end in ends]
        if names[0] in tensors:
            _require_fit(model, place, tensors, names)
            yield _Module(place, names)


def _require_fit(
    model: ModelConfig, place: AdapterPlace, tensors: Mapping[str, Tensor], names: Sequence[str]
) -> None:
    """Raise InputError if the shapes of the adapter's tensors `names` do not fit the linear layer
    that the adapter changes."""
    linear = parameters.layer(model)[place.linear.split(".", 2)[2]]
    assert isinstance(linear, Linear)
    own = place.rows.stop - place.rows.start
    outputs = {own}
    if is_fused(model, place):
        outputs.add(sum(linear.outputs))
    for name in names:
        shape = [*tensors[name].shape] if name in tensors else []
        rank = len(tensors[names[0]])
        if name.endswith("lora_A.weight"):
            fits = len(shape) == 2 and shape[0] > 0 and shape[1] == linear.inputs
            legal = "inputs"
        elif name.endswith("lora_B.weight"):
            fits = len(shape) == 2 and shape[0] in outputs and shape[1] == rank
            legal = "outputs"
        else:
            # the shape of the factors says whether they multiply inputs (feedforward_modules in
            # `peft`) or outputs
            shapes = [[1, linear.inputs]] if place.by_rows else [[n, 1] for n in outputs]
            fits = shape in shapes
            legal = f"channels, as {shapes[0]},"
        if not fits:
            reason = f"has shape {shape}" if name in tensors else "is missing"
            raise InputError(
                f"{name} {reason}: it is not of this model, whose {place.linear} has "
                f"{linear.inputs} inputs and {own} outputs; legal: the {legal} of its base"
            )


def _part(place: AdapterPlace, whole: Tensor) -> Tensor:
    """Return the rows of `whole`, a tensor of the file, that belong to the adapter of ptdmpi at
    `place`. For example, `whole` may have rows for queries, keys and values, and the adapter only
    changes the keys."""
    size = place.rows.stop - place.rows.start
    if place.by_rows or len(whole) == size:
        return whole
    return whole[place.rows]


def _low_rank(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], own: Sequence[_Module], where: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the keys of [adapt] for LoRA, and A and B of all adapters. All adapters get the
    highest rank of any adapter in the file.

    Adapters of a lower rank are padded with zeros. In ptdmpi all adapters have the same scale
    (alpha / rank), so B is multiplied by the ratio of the adapter's scale in the file to this
    common scale. Raise InputError if the configuration contradicts the tensors.
    """
    pairs = [_used(module, tensors) for module in own]
    rank = max(len(a) for a, _ in pairs)
    alpha = _number(config, "lora_alpha", where)
    usual = _number(config, "r", where)
    scale = alpha / usual
    names = [module.names[0].removesuffix(".lora_A.weight") for module in own]
    alphas = _pattern(config, "alpha_pattern", names, where)
    ranks = _pattern(config, "rank_pattern", names, where)
    ours: dict[str, Tensor] = {}
    for name, module, (a, b) in zip(names, own, pairs, strict=True):
        place = module.place
        stated = ranks.get(name, usual)
        theirs = len(tensors[module.names[0]])
        if stated != theirs:
            raise InputError(
                f"{where}: r or rank_pattern give rank {stated:g} of {name}, but "
                f"{module.names[0]} has {counted(theirs, 'row')}; legal: the same"
            )
        factor = alphas.get(name, alpha) / theirs / scale
        if factor != 1.0:
            b = b * factor
        padded_a = a.new_zeros(rank, a.shape[1])
        padded_a[: len(a)] = a
        padded_b = b.new_zeros(len(b), rank)
        padded_b[:, : len(a)] = b
        ours[f"{place.linear}.lora_{place.leaf}.a"] = padded_a
        ours[f"{place.linear}.lora_{place.leaf}.b"] = padded_b
    dropout = _number({"lora_dropout": 0.0, **config}, "lora_dropout", where, least=0.0, below=1.0)
    return {"rank": rank, "alpha": scale * rank, "dropout": dropout}, ours


def _pattern(
    config: Mapping[str, Any], name: str, modules: Sequence[str], where: str
) -> dict[str, float]:
    """Return a table that maps names of modules to numbers. The table `name` in adapter_config.json
    has a number for each of its keys. A module that matches a key gets the number of this key.

    A key is a regular expression. A key matches a module if it matches the module's complete name,
    or the end of the name after a dot. If several keys match, the first of them is used, as in
    `peft.utils.other.get_pattern_key`. Raise InputError for a key that matches no module, and for a
    key that could take years to compare with a name.
    """
    table = config.get(name) or {}
    if not isinstance(table, dict):
        raise InputError(f"{where}: {name} = {table!r}; legal: a table of numbers")
    numbers: dict[str, float] = {}
    for pattern in table:
        value = _number(table, pattern, where)
        if SLOW.search(pattern) or len(REPEAT.findall(pattern)) > MOST_REPEATS:
            raise InputError(
                f"{where}: {name}: {pattern!r} repeats too much; legal: no repeated group, and at "
                f"most {MOST_REPEATS} of * + and {{"
            )
        try:
            own = [module for module in modules if re.match(rf"(.*\.)?({pattern})$", module)]
        except (re.error, OverflowError, RecursionError) as error:
            raise InputError(
                f"{where}: {name}: {pattern!r}: {error}; legal: a regular expression"
            ) from None
        if not own:
            raise InputError(
                f"{where}: {name}: {pattern!r} names no module that has an adapter; legal: the "
                f"end of the name of one that has, such as {modules[0].rpartition('.')[2]!r}"
            )
        for module in own:
            numbers.setdefault(module, value)
    return numbers


def _number(
    table: Mapping[str, Any], name: str, where: str, *, least: float = 1e-9, below: float = math.inf
) -> float:
    """Return the number in the key `name` of adapter_config.json. Raise InputError if the value is
    not a number in [least, below)."""
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        value = math.nan
    if not least <= value < min(below, MOST_NUMBER):
        legal = "a number above 0" if below == math.inf else f"{least:g} to below {below:g}"
        raise InputError(f"{where}: {name} = {table.get(name)!r}; legal: {legal}")
    return float(value)
