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
from ptdmpi.config import AdaptConfig, InputError, ModelConfig
from ptdmpi.config.adapt import targets_of
from ptdmpi.convert.folder import new_directory
from ptdmpi.convert.from_hf import write_checkpoint
from ptdmpi.convert.tensors import slabs
from ptdmpi.inference.stored import CONFIG, KEPT, StoredModel, open_adapter, open_model
from ptdmpi.lineage.adapted import Adapted, Base
from ptdmpi.model.state import WEIGHTS, key
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.parameters import Linear

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
    for layer in range(model.layers):
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
    tensors by logical name."""

    adapted: Adapted
    model: ModelConfig
    tensors: Tensors

    @property
    def places(self) -> list[AdapterPlace]:
        return list(places(self.model, self.adapted.adapt))


def load_adapter(path: Path) -> LoadedAdapter:
    """The adapters that `path` names. Raises InputError."""
    found = open_adapter(path)
    model = ModelConfig.model_validate(found.manifest.said["model"])
    prefix = key(WEIGHTS, "")
    with Reader(found.checkpoint, found.manifest) as reader:
        names = [name for name in (*reader.tensors, *reader.means) if name.startswith(prefix)]
        tensors = {
            name.removeprefix(prefix): _whole(reader, name, found.manifest[name].shape)
            for name in names
        }
    return LoadedAdapter(found.adapted, model, tensors)


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


def merge(base: Path, adapter: Path, target: Path) -> int:
    """The whole model that `base` with `adapter` is, as a directory that `train`, `evaluate`,
    `generate` and `convert` take; returns its bytes. Raises InputError; then there is no
    `target`."""
    stored, beside = open_model(base), load_adapter(adapter)
    open_adapter(adapter).over(stored, stored.config())
    with new_directory(target) as folder, stored.reader() as reader:
        parts = list(_merged(reader, beside))
        files.require_space(folder, sum(part.nbytes for part in parts))
        said = {k: v for k, v in stored.manifest.said.items() if k == "trained_on"}
        model = stored.config().model.model_dump()
        size = write_checkpoint(folder / "checkpoints", parts, model, said)
        _write_config(folder / CONFIG, stored)
        if (stored.path / KEPT).is_dir():
            shutil.copytree(stored.path / KEPT, folder / KEPT)
    return size


def _merged(reader: Reader, beside: LoadedAdapter) -> Iterator[Outgoing]:
    """Every weight of the base, in pieces of whole rows, with what stands beside it."""
    changes: dict[str, list[AdapterPlace]] = {}
    for place in beside.places:
        for kind in ("weight", "bias"):
            changes.setdefault(f"{place.linear}.{kind}", []).append(place)
    prefix = key(WEIGHTS, "")
    for name in sorted({*reader.manifest.names}):
        if not name.startswith(prefix):
            continue
        stored = reader.manifest[name]
        own = changes.get(name.removeprefix(prefix), [])
        for box in slabs(stored.shape, np.dtype(stored.dtype).itemsize):
            values = partial(_changed, reader, name, box, beside, own)
            yield Outgoing(name, stored.shape, box, stored.dtype, values)


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
    the difference (Eckart and Young 1936). Of a merged model whose adapter had no higher rank that
    is the adapter again, up to its two factors.

    Returns the greatest part that is left, over the magnitude of its difference, and the names of
    other parameters that differ, which no adapter holds. Raises InputError.
    """
    one, other = open_model(base), open_model(tuned)
    directory, known = base_at(base)
    adapt = AdaptConfig(method="lora", rank=rank, alpha=float(rank), base=str(directory))
    model = one.config().model
    found: dict[str, Tensor] = {}
    left = 0.0
    with one.reader() as before, other.reader() as after:
        _require_same_shapes(before, after)
        for place in places(model, adapt):
            difference = _difference(before, after, f"{place.linear}.weight", place.rows)
            a, b = _factors(difference, rank)
            found[f"{place.linear}.lora_{place.leaf}.a"] = a.float()
            found[f"{place.linear}.lora_{place.leaf}.b"] = b.float()
            size = float(difference.norm())
            if size:
                left = max(left, float((difference - b @ a).norm()) / size)
        linears = {f"{place.linear}.weight" for place in places(model, adapt)}
        rest = _others(before, after, linears)
    adapted = Adapted(adapt, Base(str(directory), known.sha256))
    write_adapter(target, LoadedAdapter(adapted, model, found))
    return left, rest


def _factors(difference: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A and B, of equal norms, padded with zeros where the matrix has no such rank."""
    u, s, v = torch.linalg.svd(difference, full_matrices=False)
    held = min(rank, len(s))
    root = s[:held].sqrt()
    a = difference.new_zeros(rank, difference.shape[1])
    b = difference.new_zeros(difference.shape[0], rank)
    a[:held], b[:, :held] = root[:, None] * v[:held], u[:, :held] * root
    return a, b


def _require_same_shapes(before: Reader, after: Reader) -> None:
    for name in before.manifest.names:
        if name.startswith(key(WEIGHTS, "")):
            after.require(name, before.manifest[name].shape)


def _others(before: Reader, after: Reader, linears: set[str]) -> list[str]:
    """Parameters besides `linears` that differ."""
    prefix, found = key(WEIGHTS, ""), []
    for name in sorted({*before.manifest.names}):
        short = name.removeprefix(prefix)
        if name.startswith(prefix) and short not in linears:
            rows = slice(0, before.manifest[name].shape[0])
            if bool(_difference(before, after, short, rows).any()):
                found.append(short)
    return found


def _difference(before: Reader, after: Reader, name: str, rows: slice) -> Tensor:
    """Rows of a weight in float64: what is there after, less what was before."""
    stored = key(WEIGHTS, name)
    box = Box.whole(before.manifest[stored].shape).rows(rows.start, rows.stop)
    old, new = (torch.from_numpy(_read(one, stored, box)).double() for one in (before, after))
    return new - old


def _whole(reader: Reader, name: str, shape: Sequence[int]) -> Tensor:
    return torch.from_numpy(_read(reader, name, Box.whole(tuple(shape))))


def _read(reader: Reader, name: str, box: Box) -> Array:
    values = np.empty(box.size, reader.manifest[name].dtype)
    try:
        reader.read(name, box, values)
    except Damaged as error:
        raise InputError(str(error)) from None
    return values


def _numpy(values: Tensor) -> Array:
    return values.float().contiguous().numpy()


def _write_config(path: Path, stored: StoredModel) -> None:
    import tomlkit

    kept: dict[str, Any] = {
        name: stored.tree[name] for name in ("model", "precision", "data") if name in stored.tree
    }
    kept["model"] = {name: one for name, one in kept["model"].items() if one is not None}
    write_whole(path, tomlkit.dumps(kept))


def size_of(tensors: Tensors) -> int:
    """Elements of all of them."""
    return sum(math.prod(one.shape) for one in tensors.values())
