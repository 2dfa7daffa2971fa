"""Adapters and whole models: one made of a base and what was trained beside it, and back."""

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptdmpi.base.box import Box
from ptdmpi.base.disk import write_whole
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.base import base_at
from ptdmpi.checkpoint.boxes import Array, Damaged, Outgoing, Reader
from ptdmpi.checkpoint.load import POSITIONS
from ptdmpi.config import AdaptConfig, Config, InputError, ModelConfig
from ptdmpi.config.adapt import targets_of
from ptdmpi.convert.folder import new_directory
from ptdmpi.convert.from_hf import write_checkpoint
from ptdmpi.convert.tensors import slabs
from ptdmpi.data.chat_template import TEMPLATE
from ptdmpi.inference.stored import (
    CONFIG,
    KEPT,
    StoredAdapter,
    StoredModel,
    config_of,
    declarations,
    open_adapter,
    open_model,
)
from ptdmpi.lineage.adapted import NO_TASK, Adapted
from ptdmpi.model.parameters import Declaration
from ptdmpi.model.state import WEIGHTS, key
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.parameters import Linear, task_head

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class AdapterPlace:
    """Where one adapter of a layer stands: beside the output number `output` of a linear, whose
    rows of the weight are `rows`; of a linear by rows beside all of it."""

    linear: str
    target: str
    output: int
    rows: slice
    by_rows: bool

    @property
    def layer(self) -> int:
        return int(self.linear.split(".", 2)[1])

    @property
    def leaf(self) -> str:
        return self.target.rpartition(".")[2]

    def low_rank(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """A [r, inputs] and B [outputs, r] of it."""
        a, b = (tensors[f"{self.linear}.lora_{self.leaf}.{one}"] for one in "ab")
        return a, b

    def factors(self, tensors: Tensors) -> Tensor:
        """Its factors of (IA)^3."""
        return tensors[f"{self.linear}.ia3_{self.leaf}.weight"]


def places(model: ModelConfig, adapt: AdaptConfig) -> Iterator[AdapterPlace]:
    """All adapters of a model, layer by layer."""
    parts = parameters.layer(model)
    for layer in range(adapt.first_layer, model.layers):
        for target, (name, output) in targets_of(adapt, model.gates).items():
            linear = parts[name]
            assert isinstance(linear, Linear)
            start = sum(linear.outputs[:output])
            rows = slice(start, start + linear.outputs[output])
            split = linear.split == "rows"
            yield AdapterPlace(f"layers.{layer}.{name}", target, output, rows, split)


@dataclass(frozen=True)
class LoadedAdapter:
    """Adapters in memory: [adapt], the shape of their model, which base they stand on, and their
    tensors by logical name, with those of their head for a task."""

    adapted: Adapted
    model: ModelConfig
    tensors: Tensors

    @property
    def places(self) -> list[AdapterPlace]:
        return list(places(self.model, self.adapted.adapt))


def load_adapter(path: Path, kind: str = WEIGHTS) -> LoadedAdapter:
    """The adapters that `path` names; `kind` stands for their weights. Raises InputError."""
    found = open_adapter(path, kind)
    prefix = key(WEIGHTS, "")
    with Reader(found.checkpoint, found.manifest) as reader:
        names = [name for name in (*reader.tensors, *reader.means) if name.startswith(prefix)]
        tensors = {name.removeprefix(prefix): whole_tensor(reader, name) for name in names}
    return LoadedAdapter(found.adapted, found.model, tensors)


def write_adapter(target: Path, adapter: LoadedAdapter) -> int:
    """A checkpoint of adapters at `target`, which must not exist; returns its bytes. Raises
    InputError."""
    with new_directory(target) as folder:
        parts = [
            Outgoing(key(WEIGHTS, name), tuple(one.shape), Box.whole(one.shape), "float32", numbers)
            for name, one in adapter.tensors.items()
            for numbers in (partial(_numpy, one),)
        ]
        model = adapter.model.model_dump()
        return write_checkpoint(folder / "checkpoints", parts, model, adapter.adapted.in_manifest())


def merge(base: Path, adapter: Path, target: Path, kind: str = WEIGHTS) -> tuple[int, str]:
    """The whole model that `base` with `adapter` is, as a directory that `train`, `evaluate`,
    `generate` and `convert` take, with the chat template of either; returns its bytes, and a note
    of what it lacks. `kind` stands for the weights of `adapter`. Raises InputError; then there is
    no `target`."""
    stored, beside, opened = open_model(base), load_adapter(adapter, kind), open_adapter(adapter)
    config = opened.over(stored, stored.config())
    template, note = _template(stored, opened)
    model = config.model.model_dump()
    needed = declarations(config_of(model), stored.vocab_size)
    with new_directory(target) as folder, stored.reader() as reader:
        parts = list(_merged(reader, beside, needed))
        files.require_space(folder, sum(part.nbytes for part in parts))
        said = {k: v for k, v in stored.manifest.said.items() if k == "trained_on"}
        size = write_checkpoint(folder / "checkpoints", parts, model, said)
        _write_config(folder / CONFIG, stored, config)
        if (stored.path / KEPT).is_dir():
            shutil.copytree(stored.path / KEPT, folder / KEPT)
        if template is not None:
            shutil.copyfile(template, folder / TEMPLATE)
    return size, note


def _merged(
    reader: Reader, beside: LoadedAdapter, needed: Mapping[str, Declaration]
) -> Iterator[Outgoing]:
    """Every weight of the whole model, in pieces of whole rows: that of the base with what stands
    beside it, and the head that was trained with that. Of a longer base's learned positions those
    in front."""
    changes: dict[str, list[AdapterPlace]] = {}
    for place in beside.places:
        for kind in ("weight", "bias"):
            changes.setdefault(f"{place.linear}.{kind}", []).append(place)
    for name, declaration in sorted(needed.items()):
        stored, shape, own = key(WEIGHTS, name), declaration.shape, beside.tensors.get(name)
        if own is not None:
            yield Outgoing(stored, shape, Box.whole(shape), "float32", partial(_numpy, own))
            continue
        dtype = reader.manifest[stored].dtype
        for box in slabs(shape, np.dtype(dtype).itemsize):
            values = partial(_changed, reader, stored, box, beside, changes.get(name, []))
            yield Outgoing(stored, shape, box, dtype, values)


def _changed(
    reader: Reader, name: str, box: Box, beside: LoadedAdapter, own: Sequence[AdapterPlace]
) -> Array:
    """A slab of a weight or bias of the merged model, computed in float64."""
    values = _read(reader, name, box)
    if not own:
        return values
    wide = torch.from_numpy(values).double()
    first, last = box.start[0], box.stop[0]
    for place in own:
        start = max(first, place.rows.start)
        stop = min(last, place.rows.stop)
        if start >= stop:
            continue
        here = slice(start - first, stop - first)
        there = slice(start - place.rows.start, stop - place.rows.start)
        wide[here] = _merged_rows(place, beside, wide[here], there)
    return wide.to(torch.from_numpy(values).dtype).numpy()


def _merged_rows(place: AdapterPlace, beside: LoadedAdapter, rows: Tensor, there: slice) -> Tensor:
    """Rows of a weight, or elements of a bias, with what stands beside them."""
    is_bias, adapt = rows.dim() == 1, beside.adapted.adapt
    if adapt.method == "lora":
        if is_bias:
            return rows
        a, b = (one.double() for one in place.low_rank(beside.tensors))
        return rows + adapt.scale * (b[there] @ a)
    factors = place.factors(beside.tensors).double()
    if place.by_rows:  # of the input: the bias stands behind it
        return rows if is_bias else rows * factors
    return rows * (factors[there] if is_bias else factors[there, None])


def split(base: Path, tuned: Path, target: Path, rank: int) -> tuple[float, list[str]]:
    """The adapter of rank `rank` beside all linears that is nearest to what `tuned` differs from
    `base` in: of each linear, and of q, k and v each for itself, the greatest singular values of
    the difference (Eckart and Young 1936). It begins at the first layer that differs. Of a merged
    model whose adapter had no higher rank that is the adapter again, up to its two factors.

    Returns the greatest part that is left, over the magnitude of its difference, and the names of
    other parameters that differ, which no adapter holds. Raises InputError.
    """
    one, other = open_model(base), open_model(tuned)
    directory, known = base_at(base)
    adapt = AdaptConfig(method="lora", rank=rank, alpha=float(rank), base=str(directory))
    config = other.config()
    model, task = config.model, other.task if config.model.classifies else NO_TASK
    names, head = declarations(config, other.vocab_size), task_head(model)
    found: dict[str, Tensor] = {}
    left, first = 0.0, model.layers
    with one.reader() as before, other.reader() as after:
        rest = [name for name in names if name not in head]
        _require_same_shapes(before, after, rest)
        for place in places(model, adapt):
            difference = _difference(before, after, f"{place.linear}.weight", place.rows)
            if not difference.isfinite().all():
                raise InputError(
                    f"{key(WEIGHTS, place.linear)}.weight of {base} or {tuned}: inf or NaN; legal: "
                    "finite weights"
                )
            a, b = _factors(difference, rank)
            found[f"{place.linear}.lora_{place.leaf}.a"] = a.float()
            found[f"{place.linear}.lora_{place.leaf}.b"] = b.float()
            size = float(difference.norm())
            if size:
                first = min(first, place.layer)
                left = max(left, float((difference - b @ a).norm()) / size)
        linears = {f"{place.linear}.weight" for place in places(model, adapt)}
        others = list(_others(before, after, sorted({*rest} - linears)))
        if 0 < first < model.layers:
            adapt = adapt.model_copy(update={"first_layer": first})
            kept = tuple(f"{place.linear}." for place in places(model, adapt))
            found = {name: one for name, one in found.items() if name.startswith(kept)}
        found |= {name: whole_tensor(after, key(WEIGHTS, name)) for name in head}
    write_adapter(target, LoadedAdapter(Adapted(adapt, known, task), model, found))
    return left, others


def _factors(difference: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A and B, of equal norms, padded with zeros where the matrix has no such rank."""
    u, s, v = torch.linalg.svd(difference, full_matrices=False)
    held = min(rank, len(s))
    root = s[:held].sqrt()
    a = difference.new_zeros(rank, difference.shape[1])
    b = difference.new_zeros(difference.shape[0], rank)
    a[:held], b[:, :held] = root[:, None] * v[:held], u[:, :held] * root
    return a, b


def _require_same_shapes(before: Reader, after: Reader, names: Sequence[str]) -> None:
    """Raises InputError unless the base has these weights of the tuned model; more learned
    positions do as well."""
    for name in names:
        there, shape = before.manifest.find(key(WEIGHTS, name)), after.manifest[key(WEIGHTS, name)]
        rows, *rest = shape.shape
        if name == POSITIONS and there is not None:
            rows = max(rows, there.shape[0])
        before.require(key(WEIGHTS, name), (rows, *rest))


def _others(before: Reader, after: Reader, names: Sequence[str]) -> Iterator[str]:
    """Those of some parameters that differ."""
    for name in names:
        rows = slice(0, after.manifest[key(WEIGHTS, name)].shape[0])
        if bool(_difference(before, after, name, rows).any()):
            yield name


def _difference(before: Reader, after: Reader, name: str, rows: slice) -> Tensor:
    """Rows of a weight in float64: what is there after, less what was before."""
    stored = key(WEIGHTS, name)
    box = Box.whole(after.manifest[stored].shape).rows(rows.start, rows.stop)
    old, new = (torch.from_numpy(_read(one, stored, box)).double() for one in (before, after))
    return new - old


def whole_tensor(reader: Reader, name: str) -> Tensor:
    """All of a tensor of a checkpoint. Raises InputError where it is damaged."""
    return torch.from_numpy(_read(reader, name, Box.whole(reader.manifest[name].shape)))


def _read(reader: Reader, name: str, box: Box) -> Array:
    values = np.empty(box.size, reader.manifest[name].dtype)
    try:
        reader.read(name, box, values)
    except Damaged as error:
        raise InputError(str(error)) from None
    return values


def _numpy(values: Tensor) -> Array:
    return values.float().contiguous().numpy()


def _write_config(path: Path, stored: StoredModel, config: Config) -> None:
    """The model and the task of `config`, with what a training of the base was told besides."""
    import tomlkit

    kept: dict[str, Any] = {
        name: stored.tree[name] for name in ("precision", "data") if name in stored.tree
    }
    kept["model"] = {k: one for k, one in config.model.model_dump().items() if one is not None}
    if config.task.kind != "none":
        task = config.task.model_dump() | {"labels": list(config.task.labels)}
        task["tokenizer"] = config.task.tokenizer or _tokenizer_of(stored)
        kept["task"] = {name: one for name, one in task.items() if one}
    write_whole(path, tomlkit.dumps(kept))


def _template(stored: StoredModel, adapter: StoredAdapter) -> tuple[Path | None, str]:
    """The chat template that the merged model is to have beside it: of the adapter's conversations,
    else what the base has so; and a note where that of the adapter is not to be found."""
    # reads a shard by h5py, which adapters of others' models do without
    from ptdmpi.inference.tokenizer import template_file

    found, note, own = None, "", stored.path / TEMPLATE
    try:
        found = template_file(adapter) if adapter.datasets else None
    except InputError as error:
        note = f"no {TEMPLATE} of the adapter is written: {error}"
    return found or (own if own.is_file() else None), note


def _tokenizer_of(stored: StoredModel) -> str:
    """What a task is to name as the tokenizer of the model beneath; "" where that goes along with
    it, or is not known."""
    # reads a shard by h5py, which adapters of others' models do without
    from ptdmpi.generate.text import name_of

    if (stored.path / KEPT).is_dir():
        return ""
    try:
        return name_of(stored)
    except InputError:
        return ""


def size_of(tensors: Tensors) -> int:
    """Elements of all of them."""
    return sum(math.prod(one.shape) for one in tensors.values())
