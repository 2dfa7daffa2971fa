"""Converting a checkpoint of ptdmpi to a Hugging Face model directory."""

import json
import math
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
from ptdmpi.config import InputError, ModelConfig
from ptdmpi.convert import tensors
from ptdmpi.convert.ahead.layers import LEFT_OUT, exported, module_of, modules_in
from ptdmpi.convert.check import compare
from ptdmpi.convert.families import family_for, family_of
from ptdmpi.convert.family import (
    AHEAD,
    ConfigJson,
    Counterpart,
    Family,
    copies_of,
    counterparts,
)
from ptdmpi.convert.folder import BUFFERS, HEADERS, Converted, new_directory
from ptdmpi.convert.heads import lost, padding, task_in, with_task
from ptdmpi.convert.packed import PackedModel, UnpackedFiles
from ptdmpi.convert.plan import Plan, make_plan
from ptdmpi.convert.tensors import TYPES, Stored, WeightFiles, slabs
from ptdmpi.data.chat_template import TEMPLATE
from ptdmpi.inference.folded import fold, require_unpacked
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

# Maps the name of a data type in config.json to its name in safetensors.
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Contents:
    """The contents of the directory to write. `config` is the content of config.json. `headers` has
    the header of each weight file, by name. `kept` is the folder in which `from_hf` has stored the
    other files of the original model, which are copied; None if the model was not converted from
    Hugging Face. `others` has further files: name -> content. `note` is for the user: it says which
    files are missing, or differ from the files in `kept`."""

    family: Family
    config: dict[str, Any]
    headers: dict[str, str]
    kept: Path | None
    others: Mapping[str, bytes] = field(default_factory=dict)
    note: str = ""

    @property
    def tensors(self) -> dict[str, Stored]:
        """Return the type, shape and size of every tensor, by its name in the weight files."""
        return dict(entry for text in self.headers.values() for entry in tensors.entries(text))


def to_hf(
    source: Path,
    target: Path,
    like: Path | None = None,
    *,
    dtype: str | None = None,
    quantized: bool = False,
    kind: str = WEIGHTS,
) -> Converted:
    """Convert the newest checkpoint at `source` to a model directory `target`.

    `like` is a directory that `from_hf` wrote; the new directory gets the same files, tensor names
    and data types. By default, `like` is `source` itself or the directory from which the run began,
    if `from_hf` wrote that directory. If there is no directory `like`, the files of the model are
    made from [model], in float32. `dtype` (a key of DTYPES) is the data type of all parameters. If
    `dtype` is None, the data types do not change. If `quantized` is True, the quantized weights of
    the checkpoint stay quantized (`packed.py`). Otherwise they are dequantized. `kind` selects the
    stored values that become the weights: the trained weights, or the moving average of the
    weights.

    Raise InputError if the checkpoint is damaged, or if `transformers` has no such model. Raise
    CheckFailed if the self-check (`compare`) fails. After an error `target` is not written.
    """
    stored = open_model(source, kind)
    contents, needed = _contents(stored, like)
    plan = _plan(contents, stored, needed)
    if dtype is not None:
        contents = _in_type(contents, plan, dtype)
    damaged = examine.problems(stored.checkpoint)
    if damaged:
        raise InputError(f"checkpoint {stored.checkpoint} is damaged: {damaged[0]}")
    packed: PackedModel | None = None
    with new_directory(target) as folder, stored.reader() as reader:
        require_weights(reader, needed)
        if quantized:
            require_unpacked(stored.config().model)
            packed = PackedModel.of(contents.family, plan, reader)
            contents = _with_packed(contents, packed)
        size = sum(tensor.nbytes for tensor in contents.tensors.values())
        files.require_space(folder, size)
        _write_others(contents, folder)
        values = _Values(stored.config().model, reader, plan, contents.kept, packed)
        for file, text in contents.headers.items():
            tensors.write_file(folder / file, text, values)
        config = ConfigJson(contents.config, "config.json")
        with WeightFiles(folder) as written:
            read = written if packed is None else UnpackedFiles(written, packed)
            difference = compare(stored, contents.family, config, files=read, plan=plan)
    return Converted(
        target,
        contents.family.model_type,
        parameters=sum(math.prod(declaration.shape) for declaration in needed.values()),
        vocab_size=stored.vocab_size,
        files=len(contents.headers),
        bytes=size,
        difference=difference,
        note=_joined(contents.note, lost(stored.task)),
    )


def _contents(stored: StoredModel, like: Path | None) -> tuple[Contents, dict[str, Declaration]]:
    """Return the contents of the target directory, and the parameters of the trained model that are
    written to it. For `like` and errors see `to_hf`."""
    kept = _kept(stored, like)
    original = _contents_of(kept) if kept else None
    modules = _modules(original, stored.config().model)
    needed, left = exported(declarations(stored.config(), stored.vocab_size), modules)
    if original is not None:
        contents = _kept_contents(_with_modules(original, stored, modules), stored, needed)
    else:
        contents = _new_contents(stored, needed)
    contents = _with_template(contents, stored)
    return replace(contents, note=_joined(contents.note, left)), needed


def _modules(original: Contents | None, model: ModelConfig) -> int:
    """Return how many modules for multi-token prediction the target directory gets. If there are
    original files, this is the number of modules in the trained model or in the original files,
    whichever is less. Without original files, this is the number of modules in the trained model,
    or 0 if files of the family cannot have such modules."""
    family = family_for(model) if original is None else original.family
    if original is None or not family.copies:
        return model.mtp_modules if family.copies else 0
    return min(model.mtp_modules, modules_in(map(family.base, original.tensors), model.layers))


def _with_modules(contents: Contents, stored: StoredModel, modules: int) -> Contents:
    """Return the contents with only the first `modules` modules for multi-token prediction. The
    trained model does not have the later modules."""
    base, layers = contents.family.base, stored.config().model.layers
    numbers = {name: module_of(base(name), layers) for name in contents.tensors}
    gone = {name: layers + number for name, number in numbers.items() if number >= modules}
    if not gone or not contents.family.copies:
        return contents
    shown = ", ".join(f"layer {number}" for number in sorted(set(gone.values())))
    return replace(
        contents,
        config={**contents.config, AHEAD: modules},
        headers=_without(contents.headers, gone),
        note=f"{LEFT_OUT} that were not trained: {shown}",
    )


def _without(headers: Mapping[str, str], gone: Collection[str | None]) -> dict[str, str]:
    """Return the headers of the weight files without the tensors `gone`, and without files that
    then have no tensor."""
    left = {}
    for file, text in headers.items():
        kept = [(name, tensor) for name, tensor in tensors.entries(text) if name not in gone]
        if kept:
            left[file] = tensors.make_header(kept)
    return left


def _plan(contents: Contents, stored: StoredModel, needed: Mapping[str, Declaration]) -> Plan:
    """Return the plan for the tensors in `contents`. Tensors that `from_hf` stored as buffers are
    buffers in the plan, too. Raise the same errors as `make_plan`."""
    plan = make_plan(
        contents.family,
        stored.config().model,
        needed,
        contents.tensors,
        where=str(contents.kept or stored.checkpoint),
    )
    repeated = set(contents.family.again.values())
    for name in _buffers(contents.kept) & plan.by_name.keys():
        if contents.family.base(name) in repeated:
            plan = plan.unused(name)
    return plan


def _joined(*notes: str) -> str:
    """Return the notes that are not empty as one text."""
    return "; ".join(filter(None, notes))


def _kept(stored: StoredModel, like: Path | None) -> Path | None:
    """Return the directory in which `from_hf` stored files for the conversion back; None if there
    is none. Raise InputError if `like` is not a directory of `from_hf`."""
    if like is not None:
        if not (like / KEPT / HEADERS).is_file():
            raise InputError(f"{like} has no {KEPT}/{HEADERS}: convert from-hf writes one")
        return like / KEPT
    for path in (stored.path, stored.began):
        if path is not None and (path / KEPT / HEADERS).is_file():
            return path / KEPT
    return None


def _contents_of(kept: Path) -> Contents:
    """Return the contents of the original model that `from_hf` read. Raise InputError for damaged
    files."""
    config = tensors.read_json(kept / "config.json")
    theirs = ConfigJson(config, str(kept / "config.json"))
    family = with_task(family_of(theirs), task_in(theirs))
    headers = tensors.read_json(kept / HEADERS)
    contents = Contents(family, config, headers, kept)
    try:
        inside = bool(contents.tensors) and all(Path(file).name == file for file in headers)
    except (ValueError, TypeError, LookupError, AttributeError):
        inside = False
    if not inside:
        raise InputError(f"{kept / HEADERS} is not what convert from-hf writes")
    return contents


def _kept_contents(
    contents: Contents, stored: StoredModel, needed: Mapping[str, Declaration]
) -> Contents:
    """Return the contents of the target directory for a model that was converted from Hugging Face.
    The result is the `contents` of the original model, with the heads of the trained model
    `stored`, and with the keys of config.json that training has changed. Raise InputError if the
    original model has a head for a task but the trained model predicts tokens."""
    kept = contents.kept
    assert kept is not None, "the files of an original model are in a directory"
    if "sentence.classes" in contents.family.modules and not stored.config().model.classifies:
        raise InputError(
            f"{kept} is of a model with a head for a task, but {stored.path} predicts tokens; "
            "legal: --like a directory of from-hf whose model predicts tokens"
        )
    head = _with_task_head if stored.config().model.classifies else _without_heads
    return _with_keys(head(contents, stored, needed), contents.family, kept, stored)


def _with_keys(contents: Contents, family: Family, kept: Path, stored: StoredModel) -> Contents:
    """Return the contents of the target directory, with changed keys in config.json. The changed
    keys correspond to changes of [model], such as `rope_theta`, or belong to a head for a task.
    `family` is the family of the unchanged config.json."""
    now = stored.config().model
    keys = family.keys(ConfigJson(contents.config, str(kept / "config.json")))
    # config.json does not determine these keys: `from_hf` decides them by the tensors. So take the
    # values of the trained model, and the keys do not count as changed.
    decided = {key: getattr(now, key) for key in (*family.told_by, "mtp_depth")}
    before = config_of({**keys, **decided}).model
    same = {key: getattr(before, key) for key in ("dropout", "attention_dropout", "init_std")}
    # if the model was trained on shorter samples, keep the original sequence length
    if now.positions == "rope":
        same["seq_length"] = max(before.seq_length, now.seq_length)
    old = family.config(before, 0)
    new = contents.family.config(now.model_copy(update=same), 0)
    if now.classifies and not before.classifies:
        new |= padding(contents.config, now)
    changed = {key: value for key, value in new.items() if old.get(key) != value}
    if not changed:
        return contents
    note = f"config.json has the trained model's {', '.join(changed)}"
    return replace(
        contents, config={**contents.config, **changed}, note=_joined(contents.note, note)
    )


def _without_heads(
    contents: Contents, stored: StoredModel, needed: Mapping[str, Declaration]
) -> Contents:
    """Return the contents of the target directory, without the tensors of a head that the trained
    model no longer has. `needed` has the parameters of the trained model."""
    family = contents.family
    config = stored.config()
    there = {family.base(name): name for name in contents.tensors}
    off = [
        key
        for key, tensor in family.told_by.items()
        if tensor in there and not getattr(config.model, key)
    ]
    if not off:
        return contents
    more = declarations(config.replace("model", **dict.fromkeys(off, True)), stored.vocab_size)
    rest = {name: declaration for name, declaration in more.items() if name not in needed}
    gone = {there.get(tensor.theirs) for tensor in counterparts(family, config.model.layers, rest)}
    changed = {**contents.config, "architectures": family.config(config.model, 0)["architectures"]}
    left = ", ".join(sorted(filter(None, gone)))
    note = f"without {left}: it was trained with model.{off[0]} = false"
    headers = _without(contents.headers, gone)
    return replace(contents, config=changed, headers=headers, note=_joined(contents.note, note))


def _with_task_head(
    contents: Contents, stored: StoredModel, needed: Mapping[str, Declaration]
) -> Contents:
    """Return the contents with the head for the task that the model was trained on, in place of a
    head that predicts tokens. The table of learned positions has as many rows as in the trained
    model."""
    text = contents.family
    family = with_task(family_of(ConfigJson(contents.config, "config.json")), stored.task)
    prefixed = any(name.startswith(family.prefix) for name in contents.tensors)
    layers = stored.config().model.layers
    wanted = {tensor.theirs: tensor.shape for tensor in counterparts(family, layers, needed)}
    known = (tensor.dtype for name, tensor in contents.tensors.items() if text.base(name) in wanted)
    dtype = next(known, "F32")
    # tensors of the trained model that no file of the original model contains
    new: dict[str, Stored] = {}
    for base, shape in wanted.items():
        name = family.full(base) if prefixed else base
        new[name] = Stored(dtype, shape, math.prod(shape) * TYPES[dtype].itemsize)
    gone: list[str] = []
    last: dict[str, Stored] = {}
    by_file: dict[str, dict[str, Stored]] = {}
    for file, header in contents.headers.items():
        last = by_file[file] = {}
        for name, tensor in tensors.entries(header):
            now = new.pop(name, tensor)
            base = text.base(name)
            if base not in wanted and text.of_head(base):
                gone.append(name)
            else:
                last[name] = tensor if now.shape == tensor.shape else now
    last |= new
    headers = {file: tensors.make_header(own.items()) for file, own in by_file.items() if own}
    note = ""
    if gone:
        note = f"without {', '.join(sorted(gone))}: it has a head for a task"
    note = _joined(contents.note, note)
    return replace(contents, family=family, headers=headers, note=note)


def _buffers(kept: Path | None) -> set[str]:
    """Return the names of the buffers: tensors that `from_hf` has stored separately, because they
    are not parameters."""
    if kept is None or not (kept / BUFFERS).is_file():
        return set()
    with safe_open(kept / BUFFERS, framework="pt") as buffers:
        return set(buffers.keys())


def _new_contents(stored: StoredModel, needed: Mapping[str, Declaration]) -> Contents:
    """Return the contents of the target directory for a model that was not converted from Hugging
    Face."""
    # imported only here: this module imports h5py, which is needed only for models with shards
    from ptdmpi.convert.tokenizer import tokenizer_of

    model = stored.config().model
    family = with_task(family_for(model), stored.task)
    tokenizer = tokenizer_of(stored)
    config: dict[str, Any] = {
        "model_type": family.model_type,
        **family.config(model, stored.vocab_size),
        "bos_token_id": tokenizer.eod_id,
        "eos_token_id": tokenizer.eod_id,
        "dtype": "float32",
    }
    if model.classifies:
        config |= padding(config, model)
    described: dict[str, Stored] = {}
    for tensor in counterparts(family, model.layers, needed):
        size = 4 * math.prod(tensor.shape)
        described[family.full(tensor.theirs)] = Stored("F32", tensor.shape, size)
    # also write repeating tensors, because some versions of `transformers` read only these tensors
    repeating = {} if model.tie_embeddings else family.again
    for name, repeated in {**repeating, **copies_of(family, model)}.items():
        described[family.full(name)] = described[family.full(repeated)]
    headers = tensors.new_headers(described)
    return Contents(
        family=family,
        config=config,
        headers=headers,
        kept=None,
        others=tokenizer.files,
        note=tokenizer.note,
    )


def _with_template(contents: Contents, stored: StoredModel) -> Contents:
    """Return the contents with the chat template of the conversations that the model was trained
    on, if there were any."""
    if not (stored.datasets or (stored.path / TEMPLATE).is_file()):
        return contents
    # imported only here: this module imports h5py, which is needed only for models with shards
    from ptdmpi.convert.tokenizer import template_of

    template = template_of(stored, contents.kept)
    return replace(
        contents,
        others={**contents.others, **template.files},
        note=_joined(contents.note, template.note),
    )


def _in_type(contents: Contents, plan: Plan, dtype: str) -> Contents:
    """Return the contents of the target directory, with all parameters in the data type `dtype`.
    Buffers keep their data types."""
    stored = DTYPES[dtype]
    width = TYPES[stored].itemsize
    headers = {}
    for file, text in contents.headers.items():
        own = dict(tensors.entries(text))
        for name in own.keys() & plan.by_name.keys():
            shape = own[name].shape
            own[name] = Stored(stored, shape, math.prod(shape) * width)
        headers[file] = tensors.make_header(own.items())
    key = "torch_dtype" if "torch_dtype" in contents.config else "dtype"
    return replace(contents, config={**contents.config, key: dtype}, headers=headers)


def _with_packed(contents: Contents, packed: PackedModel) -> Contents:
    """Return the contents of the target directory, with packed tensors in place of the quantized
    matrices."""
    config = {**contents.config, "quantization_config": packed.config(contents.family)}
    return replace(contents, config=config, headers=packed.headers(contents.headers))


def _write_others(contents: Contents, folder: Path) -> None:
    """Write all files except the weight files."""
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


@dataclass(frozen=True)
class _Values:
    """A callable object that reads the elements of the tensors to write, from a checkpoint of
    `model` and from the buffers in `kept`."""

    model: ModelConfig
    reader: Reader
    plan: Plan
    kept: Path | None
    packed: PackedModel | None

    def __call__(self, name: str, stored: Stored) -> Iterator[Tensor]:
        """Yield the elements of the tensor `name` of the target format, as one or more tensors.
        Raise InputError if the checkpoint is damaged."""
        whole = None
        if self.packed is not None:
            whole = self.packed.values(self.reader, name)
        counterpart = self.plan.by_name.get(name)
        if whole is not None:
            yield whole
        elif counterpart is not None:
            yield from self._parameter(counterpart, stored)
        elif self.kept is not None:
            with safe_open(self.kept / BUFFERS, framework="pt") as buffers:
                yield buffers.get_tensor(name)
        else:
            raise AssertionError(f"{name} is not a parameter, and no buffers were stored")

    def _parameter(self, counterpart: Counterpart, stored: Stored) -> Iterator[Tensor]:
        """Yield the elements of a tensor of the target format, in the layout and data type of that
        format. The elements are a slice of one of ptdmpi's parameters."""
        ours = key(WEIGHTS, counterpart.ours)
        dtype = self.reader.manifest[ours].dtype
        for slab in slabs(stored.shape, np.dtype(dtype).itemsize):
            box = counterpart.ours_of(slab)
            array = np.empty(box.size, dtype)
            try:
                self.reader.read(ours, box, array)
            except Damaged as error:
                raise InputError(str(error)) from None
            values = fold(self.model, counterpart.ours, box, torch.from_numpy(array))
            if counterpart.transposed:
                values = values.t()
            yield values.to(TYPES[stored.dtype])
