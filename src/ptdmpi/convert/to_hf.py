"""From a checkpoint of ours to a Hugging Face model directory."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from ptdmpi.base.disk import write_whole
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint import examine
from ptdmpi.checkpoint.boxes import Damaged, Reader
from ptdmpi.config import InputError
from ptdmpi.convert import tensors
from ptdmpi.convert.check import compare
from ptdmpi.convert.families import family_for, family_of
from ptdmpi.convert.family import ConfigJson, Family, places
from ptdmpi.convert.folder import BUFFERS, HEADERS, Converted, new_directory
from ptdmpi.convert.plan import Plan, make_plan
from ptdmpi.convert.tensors import TYPES, Stored, WeightFiles, slabs
from ptdmpi.inference.stored import (
    KEPT,
    StoredModel,
    config_of,
    declarations,
    open_model,
    require_weights,
)
from ptdmpi.model.parameters import Declaration
from ptdmpi.model.state import WEIGHTS, key

# The names that config.json has for types, and those of safetensors.
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Form:
    """What the directory shall hold: config.json, the header of each weight file, and the other
    files of the directory `kept`, or those of `others`. `note`: what it lacks."""

    family: Family
    config: dict[str, Any]
    headers: dict[str, str]
    kept: Path | None
    others: Mapping[str, bytes] = field(default_factory=dict)
    note: str = ""

    @property
    def tensors(self) -> dict[str, Stored]:
        return {name: one for text in self.headers.values() for name, one in tensors.entries(text)}


def to_hf(
    source: Path, target: Path, like: Path | None = None, dtype: str | None = None
) -> Converted:
    """Convert the newest checkpoint that `source` names.

    `like`: a directory that `from_hf` wrote, whose files, names and types are taken; by default
    that of `source`, or of what its run began from. Without one they are made from [model], in
    float32. `dtype` (of DTYPES) is another type for all parameters. Raises InputError, and
    CheckFailed; then there is no `target`.
    """
    stored = open_model(source)
    needed = declarations(stored.config(), stored.vocab_size)
    kept = _kept(stored, like)
    form = _kept_form(kept, stored, needed) if kept else _new_form(stored, needed)
    where = str(kept or stored.checkpoint)
    plan = make_plan(form.family, stored.config().model, needed, form.tensors, where)
    for name in _buffers(kept) & plan.by_name.keys():
        plan = plan.unused(name)
    form = form if dtype is None else _in_type(form, plan, dtype)
    damaged = examine.problems(stored.checkpoint)
    if damaged:
        raise InputError(f"checkpoint {stored.checkpoint} is damaged: {damaged[0]}")
    size = sum(one.nbytes for one in form.tensors.values())
    with new_directory(target) as folder, stored.reader() as reader:
        require_weights(reader, needed)
        files.require_space(folder, size)
        _write_others(form, folder)
        for file, text in form.headers.items():
            tensors.write_file(folder / file, text, partial(_values, reader, plan, form.kept))
        config = ConfigJson(form.config, "config.json")
        with WeightFiles(folder) as written:
            difference = compare(stored, form.family, config, written, plan)
    count = sum(math.prod(one.shape) for one in needed.values())
    name, vocab_size = form.family.model_type, stored.vocab_size
    return Converted(
        target, name, count, vocab_size, len(form.headers), size, difference, form.note
    )


def _kept(stored: StoredModel, like: Path | None) -> Path | None:
    """The directory with what `from_hf` has kept."""
    if like is not None:
        if not (like / KEPT / HEADERS).is_file():
            raise InputError(f"{like} has no {KEPT}/{HEADERS}: convert from-hf writes one")
        return like / KEPT
    began = stored.tree.get("checkpoint", {}).get("initial")
    for path in (stored.path, *([Path(began)] if began else [])):
        if (path / KEPT / HEADERS).is_file():
            return path / KEPT
    return None


def _form_of(kept: Path) -> Form:
    config = tensors.read_json(kept / "config.json")
    family = family_of(ConfigJson(config, str(kept / "config.json")))
    headers = tensors.read_json(kept / HEADERS)
    form = Form(family, config, headers, kept)
    try:
        inside = bool(form.tensors) and all(Path(file).name == file for file in headers)
    except (ValueError, TypeError, LookupError, AttributeError):
        inside = False
    if not inside:
        raise InputError(f"{kept / HEADERS} is not what convert from-hf writes")
    return form


def _kept_form(kept: Path, stored: StoredModel, needed: Mapping[str, Declaration]) -> Form:
    return _with_keys(_without_heads(_form_of(kept), stored, needed), kept, stored)


def _with_keys(form: Form, kept: Path, stored: StoredModel) -> Form:
    """With what was changed in [model] for the training, such as `rope_theta`, in config.json."""
    family, now = form.family, stored.config().model
    keys = family.keys(ConfigJson(form.config, str(kept / "config.json")))
    before = config_of({**keys, **{key: getattr(now, key) for key in family.told_by}}).model
    # shorter samples leave the model as long as it was
    same = {key: getattr(before, key) for key in ("dropout", "attention_dropout", "init_std")}
    same["seq_length"] = max(before.seq_length, now.seq_length)
    old, new = (family.config(m, 0) for m in (before, now.model_copy(update=same)))
    changed = {key: value for key, value in new.items() if old[key] != value}
    if not changed:
        return form
    told = f"config.json has another {', '.join(changed)}, as it was trained"
    note = "; ".join(filter(None, (form.note, told)))
    return replace(form, config={**form.config, **changed}, note=note)


def _without_heads(form: Form, stored: StoredModel, needed: Mapping[str, Declaration]) -> Form:
    """Without the tensors of a head that the model was trained without, so has no more."""
    family, config = form.family, stored.config()
    there = {family.base(name): name for name in form.tensors}
    off = [key for key, tensor in family.told_by.items() if tensor in there]
    off = [key for key in off if not getattr(config.model, key)]
    if not off:
        return form
    more = declarations(config.replace("model", **dict.fromkeys(off, True)), stored.vocab_size)
    rest = {name: one for name, one in more.items() if name not in needed}
    gone = {there.get(place.theirs) for place in places(family, rest)}
    headers = {
        file: tensors.make_header((n, one) for n, one in tensors.entries(text) if n not in gone)
        for file, text in form.headers.items()
    }
    headers = {file: text for file, text in headers.items() if any(tensors.entries(text))}
    changed = {**form.config, "architectures": family.config(config.model, 0)["architectures"]}
    left = ", ".join(sorted(filter(None, gone)))
    note = f"without {left}: it was trained with model.{off[0]} = false"
    return replace(form, config=changed, headers=headers, note=note)


def _buffers(kept: Path | None) -> set[str]:
    """The tensors that are no parameters, of those that `from_hf` has kept."""
    if kept is None or not (kept / BUFFERS).is_file():
        return set()
    with safe_open(kept / BUFFERS, framework="pt") as buffers:
        return set(buffers.keys())


def _new_form(stored: StoredModel, needed: Mapping[str, Declaration]) -> Form:
    # reads a shard by h5py, which a conversion of others' models does without
    from ptdmpi.convert.tokenizer import tokenizer_of

    model = stored.config().model
    family, tokenizer = family_for(model), tokenizer_of(stored)
    config = {
        "model_type": family.model_type,
        **family.config(model, stored.vocab_size),
        "bos_token_id": tokenizer.eod_id,
        "eos_token_id": tokenizer.eod_id,
        "dtype": "float32",
    }
    found = {}
    for place in places(family, needed):
        size = 4 * math.prod(place.shape)
        found[family.full(place.theirs)] = Stored("F32", place.shape, size)
    if not model.tie_embeddings:  # then some versions of `transformers` read only the repetitions
        for name, one in family.again.items():
            found[family.full(name)] = found[family.full(one)]
    headers = tensors.new_headers(found)
    return Form(family, config, headers, None, tokenizer.files, tokenizer.note)


def _in_type(form: Form, plan: Plan, dtype: str) -> Form:
    """With all parameters in another type; buffers stay."""
    kind, found = DTYPES[dtype], form.tensors
    for name in plan.by_name:
        size = math.prod(found[name].shape) * TYPES[kind].itemsize
        found[name] = Stored(kind, found[name].shape, size)
    headers = {
        file: tensors.make_header((name, found[name]) for name, _ in tensors.entries(text))
        for file, text in form.headers.items()
    }
    key = "torch_dtype" if "torch_dtype" in form.config else "dtype"
    return replace(form, config={**form.config, key: dtype}, headers=headers)


def _write_others(form: Form, folder: Path) -> None:
    """All files but the weights."""
    if form.kept is not None:
        for path in sorted(form.kept.iterdir()):
            if path.name not in (HEADERS, BUFFERS):
                shutil.copyfile(path, folder / path.name)
        if form.config == tensors.read_json(form.kept / "config.json"):
            return
    for name, content in form.others.items():
        write_whole(folder / name, content)
    _write_json(folder / "config.json", form.config)
    if tensors.SINGLE not in form.headers:
        _write_json(folder / tensors.INDEX, tensors.index_json(form.headers))


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(values, indent=2) + "\n")


def _values(
    reader: Reader, plan: Plan, kept: Path | None, name: str, stored: Stored
) -> Iterator[Tensor]:
    """The elements of one of their tensors, in pieces."""
    place = plan.by_name.get(name)
    if place is None:
        if kept is None:
            raise AssertionError(f"{name} is no parameter, and nothing was kept")
        with safe_open(kept / BUFFERS, framework="pt") as buffers:
            yield buffers.get_tensor(name)
        return
    ours = key(WEIGHTS, place.ours)
    dtype = reader.tensors[ours].dtype
    for slab in slabs(stored.shape, np.dtype(dtype).itemsize):
        box = place.ours_of(slab)
        values = np.empty(box.size, dtype)
        try:
            reader.read(ours, box, values)
        except Damaged as error:
            raise InputError(str(error)) from None
        found = torch.from_numpy(values)
        yield (found.t() if place.transposed else found).to(TYPES[stored.dtype])
