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
from ptdmpi.convert.family import ConfigJson, Family, counterparts
from ptdmpi.convert.folder import BUFFERS, HEADERS, Converted, new_directory
from ptdmpi.convert.heads import lost, padding, task_in, with_task
from ptdmpi.convert.packed import PackedModel, UnpackedFiles
from ptdmpi.convert.plan import Plan, make_plan
from ptdmpi.convert.tensors import TYPES, Stored, WeightFiles, slabs
from ptdmpi.data.chat_template import TEMPLATE
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
class Contents:
    """What the directory shall hold: config.json, the header of each weight file, the other files
    of the directory `kept`, and those of `others`. `note`: what it lacks, or has otherwise."""

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
    source: Path,
    target: Path,
    like: Path | None = None,
    dtype: str | None = None,
    in_few_bits: bool = False,
    kind: str = WEIGHTS,
) -> Converted:
    """Convert the newest checkpoint that `source` names; `kind` stands for its weights.

    `like`: a directory that `from_hf` wrote, whose files, names and types are taken; by default
    that of `source`, or of what its run began from. Without one they are made from [model], in
    float32. `dtype` (of DTYPES) is another type for all parameters. `in_few_bits`: what the
    checkpoint has in few bits stays so (`packed`), else it is unpacked. Raises InputError, and
    CheckFailed; then there is no `target`.
    """
    stored = open_model(source, kind)
    needed = declarations(stored.config(), stored.vocab_size)
    kept = _kept(stored, like)
    contents = _kept_contents(kept, stored, needed) if kept else _new_contents(stored, needed)
    contents = _with_template(contents, stored)
    where = str(kept or stored.checkpoint)
    plan = make_plan(contents.family, stored.config().model, needed, contents.tensors, where)
    repeated = set(contents.family.again.values())
    for name in _buffers(kept) & plan.by_name.keys():
        if contents.family.base(name) in repeated:
            plan = plan.unused(name)
    contents = contents if dtype is None else _in_type(contents, plan, dtype)
    damaged = examine.problems(stored.checkpoint)
    if damaged:
        raise InputError(f"checkpoint {stored.checkpoint} is damaged: {damaged[0]}")
    with new_directory(target) as folder, stored.reader() as reader:
        require_weights(reader, needed)
        packed = PackedModel.of(contents.family, plan, reader) if in_few_bits else None
        contents = contents if packed is None else _with_packed(contents, packed)
        size = sum(one.nbytes for one in contents.tensors.values())
        files.require_space(folder, size)
        _write_others(contents, folder)
        for file, text in contents.headers.items():
            values = partial(_values, reader, plan, contents.kept, packed)
            tensors.write_file(folder / file, text, values)
        config = ConfigJson(contents.config, "config.json")
        with WeightFiles(folder) as written:
            read = written if packed is None else UnpackedFiles(written, packed)
            difference = compare(stored, contents.family, config, read, plan)
    count = sum(math.prod(one.shape) for one in needed.values())
    name, vocab_size = contents.family.model_type, stored.vocab_size
    note = "; ".join(filter(None, (contents.note, lost(stored.task))))
    return Converted(target, name, count, vocab_size, len(contents.headers), size, difference, note)


def _kept(stored: StoredModel, like: Path | None) -> Path | None:
    """The directory with what `from_hf` has kept."""
    if like is not None:
        if not (like / KEPT / HEADERS).is_file():
            raise InputError(f"{like} has no {KEPT}/{HEADERS}: convert from-hf writes one")
        return like / KEPT
    for path in (stored.path, stored.began):
        if path is not None and (path / KEPT / HEADERS).is_file():
            return path / KEPT
    return None


def _contents_of(kept: Path) -> Contents:
    config = tensors.read_json(kept / "config.json")
    said = ConfigJson(config, str(kept / "config.json"))
    family = with_task(family_of(said), task_in(said))
    headers = tensors.read_json(kept / HEADERS)
    contents = Contents(family, config, headers, kept)
    try:
        inside = bool(contents.tensors) and all(Path(file).name == file for file in headers)
    except (ValueError, TypeError, LookupError, AttributeError):
        inside = False
    if not inside:
        raise InputError(f"{kept / HEADERS} is not what convert from-hf writes")
    return contents


def _kept_contents(kept: Path, stored: StoredModel, needed: Mapping[str, Declaration]) -> Contents:
    contents = _contents_of(kept)
    if "sentence.classes" in contents.family.modules and not stored.config().model.classifies:
        raise InputError(
            f"{kept} is of a model with a head for a task, and {stored.path} predicts tokens; "
            "legal: --like what from-hf made of one that predicts tokens"
        )
    head = _with_task_head if stored.config().model.classifies else _without_heads
    return _with_keys(head(contents, stored, needed), contents.family, kept, stored)


def _with_keys(contents: Contents, before_it: Family, kept: Path, stored: StoredModel) -> Contents:
    """With what was changed in [model] for the training, such as `rope_theta`, and what a head for
    a task is told of, in config.json, which was of the family `before_it`."""
    family, now = before_it, stored.config().model
    keys = family.keys(ConfigJson(contents.config, str(kept / "config.json")))
    before = config_of({**keys, **{key: getattr(now, key) for key in family.told_by}}).model
    same = {key: getattr(before, key) for key in ("dropout", "attention_dropout", "init_std")}
    if now.positions == "rope":  # shorter samples leave the model as long as it was
        same["seq_length"] = max(before.seq_length, now.seq_length)
    old, new = family.config(before, 0), contents.family.config(now.model_copy(update=same), 0)
    if now.classifies and not before.classifies:
        new |= padding(contents.config, now)
    changed = {key: value for key, value in new.items() if old.get(key) != value}
    if not changed:
        return contents
    told = f"config.json has another {', '.join(changed)}, as it was trained"
    note = "; ".join(filter(None, (contents.note, told)))
    return replace(contents, config={**contents.config, **changed}, note=note)


def _without_heads(
    contents: Contents, stored: StoredModel, needed: Mapping[str, Declaration]
) -> Contents:
    """Without the tensors of a head that the model was trained without, so has no more."""
    family, config = contents.family, stored.config()
    there = {family.base(name): name for name in contents.tensors}
    off = [key for key, tensor in family.told_by.items() if tensor in there]
    off = [key for key in off if not getattr(config.model, key)]
    if not off:
        return contents
    more = declarations(config.replace("model", **dict.fromkeys(off, True)), stored.vocab_size)
    rest = {name: one for name, one in more.items() if name not in needed}
    gone = {there.get(tensor.theirs) for tensor in counterparts(family, rest)}
    headers = {
        file: tensors.make_header((n, one) for n, one in tensors.entries(text) if n not in gone)
        for file, text in contents.headers.items()
    }
    headers = {file: text for file, text in headers.items() if any(tensors.entries(text))}
    changed = {**contents.config, "architectures": family.config(config.model, 0)["architectures"]}
    left = ", ".join(sorted(filter(None, gone)))
    note = f"without {left}: it was trained with model.{off[0]} = false"
    return replace(contents, config=changed, headers=headers, note=note)


def _with_task_head(
    contents: Contents, stored: StoredModel, needed: Mapping[str, Declaration]
) -> Contents:
    """With the head for a task that the model was trained with, in place of any that predicts
    tokens; and with as many learned positions as it has now."""
    text, task = contents.family, stored.task
    family = with_task(family_of(ConfigJson(contents.config, "config.json")), task)
    there = {text.base(name): one for name, one in contents.tensors.items()}
    prefixed = any(name.startswith(family.prefix) for name in contents.tensors)
    wanted = {one.theirs: one.shape for one in counterparts(family, needed)}
    dtype = next((one.dtype for base, one in there.items() if base in wanted), "F32")
    new = {
        family.full(base) if prefixed else base: Stored(
            dtype, shape, math.prod(shape) * TYPES[dtype].itemsize
        )
        for base, shape in wanted.items()
    }
    gone, files = [], {}
    for file, header in contents.headers.items():
        files[file] = dict[str, Stored]()
        for name, one in tensors.entries(header):
            now, base = new.pop(name, one), text.base(name)
            if base not in wanted and text.of_head(base):
                gone.append(name)
            else:
                files[file][name] = one if now.shape == one.shape else now
    files[file] |= new
    headers = {file: tensors.make_header(one.items()) for file, one in files.items() if one}
    note = f"without {', '.join(sorted(gone))}: it has a head for a task" if gone else ""
    return replace(contents, family=family, headers=headers, note=note)


def _buffers(kept: Path | None) -> set[str]:
    """The tensors that are no parameters, of those that `from_hf` has kept."""
    if kept is None or not (kept / BUFFERS).is_file():
        return set()
    with safe_open(kept / BUFFERS, framework="pt") as buffers:
        return set(buffers.keys())


def _new_contents(stored: StoredModel, needed: Mapping[str, Declaration]) -> Contents:
    # reads a shard by h5py, which a conversion of others' models does without
    from ptdmpi.convert.tokenizer import tokenizer_of

    model, task = stored.config().model, stored.task
    family, tokenizer = with_task(family_for(model), task), tokenizer_of(stored)
    config: dict[str, Any] = {
        "model_type": family.model_type,
        **family.config(model, stored.vocab_size),
        "bos_token_id": tokenizer.eod_id,
        "eos_token_id": tokenizer.eod_id,
        "dtype": "float32",
    }
    config |= padding(config, model) if model.classifies else {}
    found = {}
    for tensor in counterparts(family, needed):
        size = 4 * math.prod(tensor.shape)
        found[family.full(tensor.theirs)] = Stored("F32", tensor.shape, size)
    if not model.tie_embeddings:  # then some versions of `transformers` read only the repetitions
        for name, one in family.again.items():
            found[family.full(name)] = found[family.full(one)]
    headers = tensors.new_headers(found)
    return Contents(family, config, headers, None, tokenizer.files, tokenizer.note)


def _with_template(contents: Contents, stored: StoredModel) -> Contents:
    """With the chat template of the conversations that the model was trained on here."""
    if not (stored.datasets or (stored.path / TEMPLATE).is_file()):
        return contents
    # reads a shard by h5py, which a conversion of others' models does without
    from ptdmpi.convert.tokenizer import template_of

    files, told = template_of(stored, contents.kept)
    note = "; ".join(filter(None, (contents.note, told)))
    return replace(contents, others={**contents.others, **files}, note=note)


def _in_type(contents: Contents, plan: Plan, dtype: str) -> Contents:
    """With all parameters in another type; buffers stay."""
    kind, found = DTYPES[dtype], contents.tensors
    for name in plan.by_name:
        size = math.prod(found[name].shape) * TYPES[kind].itemsize
        found[name] = Stored(kind, found[name].shape, size)
    headers = {
        file: tensors.make_header((name, found[name]) for name, _ in tensors.entries(text))
        for file, text in contents.headers.items()
    }
    key = "torch_dtype" if "torch_dtype" in contents.config else "dtype"
    return replace(contents, config={**contents.config, key: dtype}, headers=headers)


def _with_packed(contents: Contents, packed: PackedModel) -> Contents:
    config = {**contents.config, "quantization_config": packed.config(contents.family)}
    return replace(contents, config=config, headers=packed.headers(contents.headers))


def _write_others(contents: Contents, folder: Path) -> None:
    """All files but the weights."""
    if contents.kept is not None:
        for path in sorted(contents.kept.iterdir()):
            if path.name not in (HEADERS, BUFFERS):
                shutil.copyfile(path, folder / path.name)
    for name, content in contents.others.items():
        write_whole(folder / name, content)
    kept = contents.kept
    if kept is not None and contents.config == tensors.read_json(kept / "config.json"):
        return
    _write_json(folder / "config.json", contents.config)
    if tensors.SINGLE not in contents.headers:
        _write_json(folder / tensors.INDEX, tensors.index_json(contents.headers))


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(values, indent=2) + "\n")


def _values(
    reader: Reader,
    plan: Plan,
    kept: Path | None,
    packed: PackedModel | None,
    name: str,
    stored: Stored,
) -> Iterator[Tensor]:
    """The elements of one of their tensors, in pieces."""
    whole = None if packed is None else packed.values(reader, name)
    if whole is not None:
        yield whole
        return
    counterpart = plan.by_name.get(name)
    if counterpart is None:
        if kept is None:
            raise AssertionError(f"{name} is no parameter, and nothing was kept")
        with safe_open(kept / BUFFERS, framework="pt") as buffers:
            yield buffers.get_tensor(name)
        return
    ours = key(WEIGHTS, counterpart.ours)
    dtype = reader.manifest[ours].dtype
    for slab in slabs(stored.shape, np.dtype(dtype).itemsize):
        box = counterpart.ours_of(slab)
        values = np.empty(box.size, dtype)
        try:
            reader.read(ours, box, values)
        except Damaged as error:
            raise InputError(str(error)) from None
        found = torch.from_numpy(values)
        yield (found.t() if counterpart.transposed else found).to(TYPES[stored.dtype])
