"""From a Hugging Face model directory to a checkpoint of ours."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ptdmpi.base.box import Box
from ptdmpi.base.disk import write_whole
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.boxes import Array, Outgoing, write
from ptdmpi.checkpoint.manifest import Progress, write_manifest
from ptdmpi.config import InputError, ModelConfig, TaskConfig
from ptdmpi.convert import tensors
from ptdmpi.convert.check import compare
from ptdmpi.convert.families import family_of
from ptdmpi.convert.family import ConfigJson, Family
from ptdmpi.convert.folder import BUFFERS, HEADERS, Converted, new_directory
from ptdmpi.convert.heads import task_in, with_task
from ptdmpi.convert.plan import Plan, make_plan
from ptdmpi.convert.tensors import WeightFiles, slabs
from ptdmpi.inference.stored import CONFIG, KEPT, config_of, declarations, open_model
from ptdmpi.model.parameters import Declaration
from ptdmpi.model.state import WEIGHTS, Counters, key
from ptdmpi.terminal.progress import progress

NO_CHOICES = (
    "config.json does not say how many candidates a question has: add task.choices to train further"
)
# These hold weights, in whatever form; everything else of a model directory is kept.
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx"}


def from_hf(source: Path, target: Path) -> Converted:
    """Convert the model directory `source`. Raises InputError, and CheckFailed; then there is no
    `target`."""
    config = ConfigJson(tensors.read_json(source / "config.json"), str(source / "config.json"))
    task = task_in(config)
    family = with_task(family_of(config), task)
    vocab_size = config.need("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise InputError(f"{config.name}: vocab_size = {vocab_size!r}; legal: 1 or more")
    keys = family.keys(config)
    with WeightFiles(source) as theirs, new_directory(target) as folder:
        model, needed = _model(keys, family, theirs, config.name, vocab_size)
        plan = make_plan(family, model, needed, theirs.tensors, str(source))
        plan = _settled(plan, model, theirs)
        parts = list(_outgoing(theirs, plan))
        files.require_space(folder, sum(part.nbytes for part in parts))
        size = write_checkpoint(folder / "checkpoints", parts, model.model_dump())
        _write_config(folder / CONFIG, model.model_dump(), task, target, source)
        _keep(folder / KEPT, theirs, plan)
        difference = compare(open_model(folder), family, config, theirs, plan)
    count = sum(math.prod(one.shape) for one in needed.values())
    note = NO_CHOICES if task.kind == "choice" else ""
    return Converted(target, family.model_type, count, vocab_size, 1, size, difference, note)


def _model(
    keys: Mapping[str, Any], family: Family, theirs: WeightFiles, name: str, vocab_size: int
) -> tuple[ModelConfig, Mapping[str, Declaration]]:
    """The model of some keys of [model], with those that only the tensors tell."""
    bases = {family.base(one) for one in theirs.tensors}
    told = {key: tensor in bases for key, tensor in family.told_by.items()}
    try:
        # their tables often have more rows than their tokenizer has ids
        ours = config_of({**keys, **told, "vocab_size": vocab_size})
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    if ours.model.layers > len(bases):  # a slip of the pen, found before so many are declared
        raise InputError(f"{name}: {ours.model.layers} layers, but {len(bases)} tensors in all")
    return ours.model, declarations(ours, vocab_size)


def _settled(plan: Plan, model: ModelConfig, theirs: WeightFiles) -> Plan:
    """With what repeats another tensor as such only where they are equal. Raises InputError."""
    for head, word in plan.again.items():
        if _equal(theirs, head, word):
            continue
        if model.tie_embeddings:
            raise InputError(
                f"{theirs.directory}: {head} and {word} differ, though they are one parameter; "
                "legal: equal ones, or an output of its own with tie_word_embeddings = false"
            )
        # `transformers` ties neither where the head is not tied, and computes with the repetition
        plan = plan.unused(word)
    return plan


def _equal(theirs: WeightFiles, one: str, other: str) -> bool:
    return all(
        torch.equal(theirs.read(one, slab), theirs.read(other, slab))
        for slab in slabs(theirs.tensors[one].shape, 8)
    )


def _outgoing(theirs: WeightFiles, plan: Plan) -> Iterator[Outgoing]:
    """Every parameter as pieces of whole rows of ours, read when they are written."""
    chosen = {name: found for name, found in plan.by_name.items() if name not in plan.again}
    wide = {found.ours for n, found in chosen.items() if theirs.tensors[n].dtype == "F64"}
    for name, found in chosen.items():
        dtype = torch.float64 if found.ours in wide else torch.float32
        for slab in slabs(found.box.size, dtype.itemsize):
            yield Outgoing(
                key(WEIGHTS, found.ours),
                found.whole,
                slab.within(found.box),
                str(dtype).removeprefix("torch."),
                partial(_ours, theirs, name, slab, found.transposed, dtype),
            )


def _ours(theirs: WeightFiles, name: str, slab: Box, transposed: bool, dtype: torch.dtype) -> Array:
    values = theirs.read(name, slab.transposed() if transposed else slab)
    return (values.t() if transposed else values).to(dtype).contiguous().numpy()


def write_checkpoint(
    directory: Path,
    parts: Sequence[Outgoing],
    model: Mapping[str, Any],
    lineage: Mapping[str, Any] | None = None,
) -> int:
    """A checkpoint of weights alone, before any step, below `directory`; returns its bytes.
    `model` and `lineage` as of `write_manifest`."""
    temporary = directory / (files.name_of(0) + ".tmp")
    temporary.mkdir(parents=True)
    with progress("converting", sum(part.nbytes for part in parts), "B") as advance:
        told = [replace(part, values=partial(_told, part, advance)) for part in parts]
        written = write(temporary / "rank-00000.safetensors", told)
    fresh = Progress(step=0, samples=0, seed=0, **asdict(Counters()))
    write_manifest(temporary, fresh, model, [written], lineage)
    files.publish(temporary, ())
    return written.bytes


def _told(part: Outgoing, advance: Callable[[float], object]) -> Array:
    advance(part.nbytes)
    return part.values()


def _write_config(
    path: Path, model: Mapping[str, Any], task: TaskConfig, target: Path, source: Path
) -> None:
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment(f"Converted from {source}."))
    document.add(tomlkit.comment("To train it further, copy this file and add [run], [batch] and"))
    document.add(tomlkit.comment("[[data.train]]: the run begins from these weights."))
    document.add("model", {key: value for key, value in model.items() if value is not None})
    if task.kind != "none":
        said = {"kind": task.kind, "labels": list(task.labels)}
        document.add("task", {key: value for key, value in said.items() if value})
    document.add("checkpoint", {"initial": str(target)})
    write_whole(path, tomlkit.dumps(document))


def _keep(folder: Path, theirs: WeightFiles, plan: Plan) -> None:
    """What the way back needs besides the weights."""
    folder.mkdir()
    for path in sorted(theirs.directory.iterdir()):
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES and path.name != HEADERS:
            shutil.copyfile(path, folder / path.name)
    write_whole(folder / HEADERS, json.dumps(theirs.headers, indent=1))
    if plan.buffers:
        save_file({name: theirs.read(name) for name in plan.buffers}, folder / BUFFERS)
