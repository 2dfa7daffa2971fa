"""Converting a Hugging Face model directory to a checkpoint of ptdmpi."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ptdmpi.base.box import Box
from ptdmpi.base.disk import why_unusable, write_whole
from ptdmpi.base.progress import progress
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.boxes import Array, Outgoing, write
from ptdmpi.checkpoint.manifest import Progress, write_manifest
from ptdmpi.config import Config, InputError, ModelConfig, TaskConfig
from ptdmpi.convert import tensors
from ptdmpi.convert.ahead.layers import depth_of
from ptdmpi.convert.check import compare
from ptdmpi.convert.families import family_of
from ptdmpi.convert.family import ConfigJson, Family, copies_of
from ptdmpi.convert.folder import BUFFERS, HEADERS, HUB_NAME, Converted, new_directory
from ptdmpi.convert.heads import task_in, with_task
from ptdmpi.convert.plan import Plan, make_plan
from ptdmpi.convert.tensors import WeightFiles, slabs
from ptdmpi.inference.stored import CONFIG, KEPT, config_of, declarations, open_model
from ptdmpi.model.state import WEIGHTS, key

NO_CHOICES = (
    "config.json does not say how many candidates a question has: add task.choices to train further"
)
# The files of a model on the hub that are downloaded: all files that a conversion reads or copies.
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*")
# Name endings of files that contain weights, in any format. All other files of a model are copied.
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx"}

# Files of a model that contain a JSON object. A model may lack some of these files. If one of these
# files is damaged, the conversion stops, because the file would be copied.
_OBJECTS = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "generation_config.json",
}


def from_hf(source: Path, target: Path, hub_name: str = "") -> Converted:
    """Convert the model directory `source` to a directory `target`. If the model was downloaded
    from the hub, `hub_name` is its name there, and the directory `target` stores this name. Raise
    InputError if the model is not supported or damaged, and CheckFailed if the self-check
    (`compare`) fails. After an error `target` is not written."""
    config = ConfigJson(tensors.read_json(source / "config.json"), str(source / "config.json"))
    task = task_in(config)
    family = with_task(family_of(config), task)
    vocab_size = config.need("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise InputError(f"{config.name}: vocab_size = {vocab_size!r}; legal: 1 or more")
    keys = family.keys(config)
    _require_whole(source)
    with WeightFiles(source) as theirs, new_directory(target) as folder:
        # model.vocab_size comes from config.json instead of the tokenizer, because the embedding
        # table may have more rows than the tokenizer has ids
        keys = {**keys, "vocab_size": vocab_size}
        ours, left = _config(keys, family, theirs, config.name)
        model = ours.model
        needed = declarations(ours, vocab_size)
        plan = make_plan(family, model, needed, theirs.tensors, where=str(source))
        plan = _settled(plan, family, model, theirs)
        parts = list(_outgoing(theirs, plan))
        files.require_space(folder, sum(part.nbytes for part in parts))
        size = write_checkpoint(folder / "checkpoints", parts, model.model_dump())
        write_config(
            folder / CONFIG, model.model_dump(), task, origin=hub_name or source, target=target
        )
        _keep(folder / KEPT, theirs, plan)
        if hub_name:
            write_whole(folder / HUB_NAME, hub_name + "\n")
        difference = compare(open_model(folder), family, config, files=theirs, plan=plan)
    return Converted(
        target,
        family.model_type,
        parameters=sum(math.prod(declaration.shape) for declaration in needed.values()),
        vocab_size=vocab_size,
        files=1,
        bytes=size,
        difference=difference,
        note=NO_CHOICES if task.kind == "choice" else left,
    )


def _config(
    keys: Mapping[str, Any], family: Family, theirs: WeightFiles, name: str
) -> tuple[Config, str]:
    """Return a configuration with the given `keys` of [model], and a note for the user. Two further
    settings depend on the tensors in the files. A key of `Family.told_by` is True if the files
    contain its tensor. `mtp_depth` is 0 if the files have no modules for multi-token prediction. If
    a key is unknown or has an illegal value, raise InputError. The error message begins with
    `name`, the path of config.json."""
    bases = {family.base(tensor) for tensor in theirs.tensors}
    decided = {key: tensor in bases for key, tensor in family.told_by.items()}
    try:
        config = config_of({**keys, **decided})
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    layers = config.model.layers
    # If config.json has more layers than there are tensors, the number of layers is surely a typo.
    # Report the typo now, because declaring so many layers would take long.
    if layers > len(bases):
        raise InputError(f"{name}: {layers} layers, but {len(bases)} tensors in all")
    depth, note = depth_of(family, config.model, bases, name)
    return config.replace("model", mtp_depth=depth), note


def _require_whole(source: Path) -> None:
    """Check the files that are copied from the model directory `source`. Raise InputError for a
    link to a missing file, a pipe or a device, and for a file of _OBJECTS that is damaged."""
    for path in sorted(source.iterdir()):
        if path.suffix in WEIGHT_SUFFIXES or path.is_dir():
            continue
        if not path.is_file():
            raise InputError(f"{path}: {why_unusable(path)}; replace or remove it")
        if path.name in _OBJECTS:
            tensors.read_json(path)


def _settled(plan: Plan, family: Family, model: ModelConfig, theirs: WeightFiles) -> Plan:
    """Compare each repeating tensor (such as a tied head) with the tensor that it should repeat.
    Return the plan, changed for each pair of tensors whose values differ. In the changed plan, the
    repeating tensor is the parameter, and the other tensor is unused. Raise InputError if the
    values differ in a model whose embeddings are tied, or if the repeating tensor is a copy in a
    module for multi-token prediction."""
    copies = copies_of(family, model)
    for head, word in plan.again.items():
        if _equal(theirs, head, word):
            continue
        if family.base(head) in copies:
            raise InputError(
                f"{theirs.directory}: {head} and {word} differ, but all modules for multi-token "
                "prediction use the tables of the model; legal: equal tensors"
            )
        if model.tie_embeddings:
            raise InputError(
                f"{theirs.directory}: {head} and {word} differ, but they must be one parameter; "
                "legal: equal tensors, or tie_word_embeddings = false"
            )
        # if embeddings are not tied, `transformers` computes with the repeating tensor
        plan = plan.unused(word)
    return plan


def _equal(theirs: WeightFiles, name: str, other: str) -> bool:
    """Return True if the tensors `name` and `other` of the model have equal values."""
    return all(
        torch.equal(theirs.read(name, slab), theirs.read(other, slab))
        for slab in slabs(theirs.tensors[name].shape, 8)
    )


def _outgoing(theirs: WeightFiles, plan: Plan) -> Iterator[Outgoing]:
    """Yield every parameter of ptdmpi's model in blocks of complete rows. The values of a block are
    read only when the block is written."""
    chosen = {name: tensor for name, tensor in plan.by_name.items() if name not in plan.again}
    wide = {tensor.ours for n, tensor in chosen.items() if theirs.tensors[n].dtype == "F64"}
    for name, tensor in chosen.items():
        dtype = torch.float64 if tensor.ours in wide else torch.float32
        read = partial(_read, theirs, name, tensor.transposed)
        for slab in slabs(tensor.box.size, dtype.itemsize):
            yield Outgoing(
                tensor=key(WEIGHTS, tensor.ours),
                shape=tensor.whole,
                box=slab.within(tensor.box),
                dtype=str(dtype).removeprefix("torch."),
                values=partial(read, slab, dtype=dtype),
            )


def _read(
    theirs: WeightFiles, name: str, transposed: bool, slab: Box, *, dtype: torch.dtype
) -> Array:
    """Return the slice `slab` of the tensor `name` of `transformers`, as `dtype`. `slab` and the
    result have the dims in ptdmpi's order. If `transposed` is True, the tensor in the file has the
    two dims in the other order. The indices of `slab` count from the start of this tensor, even if
    ptdmpi's parameter contains several tensors."""
    values = theirs.read(name, slab.transposed() if transposed else slab)
    if transposed:
        values = values.t()
    return values.to(dtype).contiguous().numpy()


def write_checkpoint(
    directory: Path,
    parts: Sequence[Outgoing],
    model: Mapping[str, Any],
    lineage: Mapping[str, Any] | None = None,
) -> int:
    """Write a checkpoint of step 0 that contains only the weights `parts` into `directory`, and
    return its size in bytes. `model` and `lineage` are passed to `write_manifest`."""
    temporary = directory / (files.name_of(0) + ".tmp")
    temporary.mkdir(parents=True)
    with progress("converting", sum(part.nbytes for part in parts), "B") as advance:
        shown = [replace(part, values=partial(_advanced, part, advance)) for part in parts]
        written = write(temporary / "rank-00000.safetensors", shown)
    fresh = Progress(step=0, samples=0, seed=0)
    write_manifest(temporary, fresh, model, written=[written], lineage=lineage)
    files.publish(temporary)
    return written.bytes


def _advanced(part: Outgoing, advance: Callable[[float], object]) -> Array:
    """Return the values that an entry of the checkpoint will contain, and advance the progress
    display."""
    advance(part.nbytes)
    return part.values()


def write_config(
    path: Path, model: Mapping[str, Any], task: TaskConfig, *, origin: str | Path, target: Path
) -> None:
    """Write a config.toml for runs that begin from the converted weights at `target`. The
    config.toml has the section [model] and, if there is a task, the section [task]. A comment names
    the original model `origin`."""
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment(f"Converted from {origin}."))
    document.add(tomlkit.comment("To train the model further, copy this file, and add [run],"))
    document.add(tomlkit.comment("[batch] and [[data.train]]: the run begins from these weights."))
    document.add("model", {key: value for key, value in model.items() if value is not None})
    if task.kind != "none":
        keys = {"kind": task.kind, "labels": list(task.labels)}
        document.add("task", {key: value for key, value in keys.items() if value})
    document.add("checkpoint", {"initial": str(target)})
    write_whole(path, tomlkit.dumps(document))


def _keep(folder: Path, theirs: WeightFiles, plan: Plan) -> None:
    """Copy the files, headers and buffers of the original model `theirs` to `folder`. `to_hf` needs
    them in addition to the weights."""
    folder.mkdir()
    for path in sorted(theirs.directory.iterdir()):
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES and path.name != HEADERS:
            shutil.copyfile(path, folder / path.name)
    write_whole(folder / HEADERS, json.dumps(theirs.headers, indent=1))
    if plan.buffers:
        save_file({name: theirs.read(name) for name in plan.buffers}, folder / BUFFERS)
