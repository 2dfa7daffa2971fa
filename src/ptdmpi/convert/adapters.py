"""Merging adapters into their base model, and extracting adapters from a tuned model."""

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
from ptdmpi.config.adapt import EXPERTS, targets_of
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
from ptdmpi.plan.layer.parts import Linear
from ptdmpi.plan.shape import parameters
from ptdmpi.plan.shape.parameters import task_head

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class AdapterPlace:
    """The position of one adapter in the model. A linear layer may compute several outputs, for
    example queries, keys and values. The adapter changes output number `output` of the linear layer
    `linear`, and `rows` are the rows of the layer's weight that compute this output. If `by_rows`
    is True, tensor ranks divide the inputs of the linear layer, and the layer has one adapter for
    all its outputs."""

    linear: str
    target: str
    output: int
    rows: slice
    by_rows: bool

    @property
    def layer(self) -> int:
        """Return the number of the layer that has the adapter."""
        return int(self.linear.split(".", 2)[1])

    @property
    def leaf(self) -> str:
        """Return the last part of the target's name, which also occurs in the names of the
        adapter's tensors."""
        return self.target.rpartition(".")[2]

    def low_rank(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return the adapter's A [r, inputs] and B [outputs, r]."""
        name = f"{self.linear}.lora_{self.leaf}"
        return tensors[f"{name}.a"], tensors[f"{name}.b"]

    def factors(self, tensors: Tensors) -> Tensor:
        """Return the factors of (IA)^3: one per output of the linear layer, or one per input if
        `by_rows` is True."""
        return tensors[f"{self.linear}.ia3_{self.leaf}.weight"]


def places(model: ModelConfig, adapt: AdaptConfig) -> Iterator[AdapterPlace]:
    """Yield the positions of all adapters of a model, layer by layer."""
    parts = parameters.layer(model)
    targets = targets_of(adapt, model.gates, model.mlps)
    for layer in range(adapt.first_layer, model.layers):
        for target, (named, output) in targets.items():
            for name in _linears(model, named):
                linear = parts[name]
                assert isinstance(linear, Linear)
                start = sum(linear.outputs[:output])
                yield AdapterPlace(
                    f"layers.{layer}.{name}",
                    target,
                    output,
                    rows=slice(start, start + linear.outputs[output]),
                    by_rows=linear.split == "rows",
                )


def _linears(model: ModelConfig, name: str) -> list[str]:
    """Return the names of the linears that an adapter target changes in a layer. If `name` is a
    linear of the experts, without the number of an expert, return the names of this linear in all
    experts. Otherwise return only `name`.
    """
    if not name.startswith(f"{EXPERTS}."):
        return [name]
    end = name.removeprefix(f"{EXPERTS}.")
    return [f"{EXPERTS}.{number}.{end}" for number in range(model.experts)]


@dataclass(frozen=True)
class LoadedAdapter:
    """Adapters in memory: their configuration and base model (`adapted`), the [model] section, and
    all adapter tensors by logical name, including the tensors of a head for a task."""

    adapted: Adapted
    model: ModelConfig
    tensors: Tensors

    @property
    def places(self) -> list[AdapterPlace]:
        """Return the positions of all adapters."""
        return list(places(self.model, self.adapted.adapt))


def load_adapter(path: Path, kind: str = WEIGHTS) -> LoadedAdapter:
    """Load the adapters at `path`. `kind` selects the stored values that become the weights of the
    adapters: the trained weights, or the moving average of the weights. Raise InputError if the
    adapters are missing or damaged."""
    stored = open_adapter(path, kind)
    prefix = key(WEIGHTS, "")
    with Reader(stored.checkpoint, stored.manifest) as reader:
        names = [name for name in (*reader.tensors, *reader.means) if name.startswith(prefix)]
        tensors = {name.removeprefix(prefix): whole_tensor(reader, name) for name in names}
    return LoadedAdapter(stored.adapted, stored.model, tensors)


def write_adapter(target: Path, adapter: LoadedAdapter, template: Path | None = None) -> int:
    """Write a checkpoint of adapters at `target`, and return its size in bytes. The file `template`
    is the chat template of the adapters, if they have one. Raise InputError if `target` exists or
    cannot be written."""
    with new_directory(target) as folder:
        if template is not None:
            shutil.copyfile(template, folder / TEMPLATE)
        parts = [_float32_part(name, values) for name, values in adapter.tensors.items()]
        model = adapter.model.model_dump()
        return write_checkpoint(folder / "checkpoints", parts, model, adapter.adapted.in_manifest())


def _float32_part(name: str, values: Tensor) -> Outgoing:
    """Return a checkpoint entry for the complete weight `name`, with its `values` as float32."""
    shape = tuple(values.shape)
    return Outgoing(
        tensor=key(WEIGHTS, name),
        shape=shape,
        box=Box.whole(shape),
        dtype="float32",
        values=partial(_numpy, values),
    )


def merge(base: Path, adapter: Path, target: Path, kind: str = WEIGHTS) -> tuple[int, str]:
    """Merge the adapters at `adapter` into the model at `base`, and write the merged model at
    `target`.

    `train`, `evaluate`, `generate` and `convert` can read `target`. The merged model gets the chat
    template of the adapter. If the adapter has no template, the merged model gets the template of
    the base model. `kind` selects the stored values of the adapter that are merged: the trained
    weights, or the moving average of the weights. Return the size of the weights in bytes, and a
    note for the user if the adapter's chat template is not found ("" otherwise). Raise InputError
    if an input is missing or damaged; then `target` is not written.
    """
    stored = open_model(base)
    loaded = load_adapter(adapter, kind)
    opened = open_adapter(adapter)
    config = opened.over(stored, stored.config())
    template, note = _template(stored, opened)
    model = config.model.model_dump()
    needed = declarations(config_of(model), stored.vocab_size)
    with new_directory(target) as folder, stored.reader() as reader:
        parts = list(_merged(reader, loaded, needed))
        files.require_space(folder, sum(part.nbytes for part in parts))
        history = {k: v for k, v in stored.manifest.said.items() if k == "trained_on"}
        size = write_checkpoint(folder / "checkpoints", parts, model, history)
        _write_config(folder / CONFIG, stored, config)
        if (stored.path / KEPT).is_dir():
            shutil.copytree(stored.path / KEPT, folder / KEPT)
        if template is not None:
            shutil.copyfile(template, folder / TEMPLATE)
    return size, note


def _merged(
    reader: Reader, adapter: LoadedAdapter, needed: Mapping[str, Declaration]
) -> Iterator[Outgoing]:
    """Yield every weight of the merged model, in blocks of complete rows. `needed` has the weights
    of the merged model, and `reader` reads the base model.

    The merged model has the base model's weights plus the adapters, and the weights of a task head
    that was trained with the adapters. If the base model has more learned positions than the merged
    model, only the first positions are used.
    """
    changes: dict[str, list[AdapterPlace]] = {}
    for place in adapter.places:
        for kind in ("weight", "bias"):
            changes.setdefault(f"{place.linear}.{kind}", []).append(place)
    for name, declaration in sorted(needed.items()):
        own = adapter.tensors.get(name)
        if own is not None:
            yield _float32_part(name, own)
            continue
        stored = key(WEIGHTS, name)
        shape = declaration.shape
        dtype = reader.manifest[stored].dtype
        merged = partial(_merged_slab, reader, stored, adapter, changes.get(name, []))
        for box in slabs(shape, np.dtype(dtype).itemsize):
            yield Outgoing(
                tensor=stored, shape=shape, box=box, dtype=dtype, values=partial(merged, box=box)
            )


def _merged_slab(
    reader: Reader, name: str, adapter: LoadedAdapter, own: Sequence[AdapterPlace], *, box: Box
) -> Array:
    """Return the slice `box` of the weight or bias `name` of the merged model: the values of the
    base model, changed by the adapters `own`. The change is computed in float64."""
    values = _read(reader, name, box)
    if not own:
        return values
    wide = torch.from_numpy(values).double()
    first = box.start[0]
    last = box.stop[0]
    for place in own:
        start = max(first, place.rows.start)
        stop = min(last, place.rows.stop)
        if start >= stop:
            continue
        here = slice(start - first, stop - first)
        there = slice(start - place.rows.start, stop - place.rows.start)
        wide[here] = _merged_rows(place, adapter, wide[here], there)
    return wide.to(torch.from_numpy(values).dtype).numpy()


def _merged_rows(place: AdapterPlace, adapter: LoadedAdapter, rows: Tensor, there: slice) -> Tensor:
    """Return `rows` with the change that the adapter at `place` makes. `rows` are some rows of a
    weight, or some elements of a bias. The slice `there` gives the positions of these rows among
    the rows that the adapter changes."""
    is_bias = rows.dim() == 1
    adapt = adapter.adapted.adapt
    if adapt.method == "lora":
        if is_bias:
            return rows
        a, b = place.low_rank(adapter.tensors)
        return rows + adapt.scale * (b.double()[there] @ a.double())
    factors = place.factors(adapter.tensors).double()
    # with `by_rows`, the factors of (IA)^3 multiply the input of the linear layer, so they do not
    # change the bias
    if place.by_rows:
        return rows if is_bias else rows * factors
    return rows * (factors[there] if is_bias else factors[there, None])


def split(base: Path, tuned: Path, target: Path, rank: int) -> tuple[float, list[str]]:
    """Write a LoRA adapter of rank `rank` for all linear layers to the directory `target`. The
    adapter is the best approximation of the difference between the models at `tuned` and `base`.

    For each linear layer, the adapter keeps the `rank` greatest singular values of the difference
    of the weights (Eckart and Young 1936). Queries, keys and values are treated separately. Layers
    before the first difference between the models get no adapters. If `tuned` is a merged model
    whose adapter had at most this rank, the result is the same adapter, except for the
    factorization into A and B.

    Return two values. The first value is the largest relative error of an adapter: norm(difference
    - B A) / norm(difference). The second value has the names of the parameters that differ between
    the models but have no adapter. An adapter cannot represent these differences. Raise InputError
    for models of different shapes, for weights that are not finite, and for a rank that no
    difference can have.
    """
    models = open_model(base), open_model(tuned)
    config = models[1].config()
    model = config.model
    task = models[1].task if model.classifies else NO_TASK
    directory, origin = base_at(base)
    head = task_head(model)
    rest = [name for name in declarations(config, models[1].vocab_size) if name not in head]
    tensors: dict[str, Tensor] = {}
    left = 0.0
    first = model.layers
    with models[0].reader() as before, models[1].reader() as after:
        _require_same_shapes(before, after, rest)
        _require_rank(rank, model, after)
        adapt = AdaptConfig(method="lora", rank=rank, alpha=float(rank), base=str(directory))
        for place in places(model, adapt):
            difference = _difference(before, after, f"{place.linear}.weight", place.rows)
            if not difference.isfinite().all():
                raise InputError(
                    f"{key(WEIGHTS, place.linear)}.weight of {base} or {tuned}: inf or NaN; legal: "
                    "finite weights"
                )
            a, b = _factors(difference, rank)
            tensors[f"{place.linear}.lora_{place.leaf}.a"] = a.float()
            tensors[f"{place.linear}.lora_{place.leaf}.b"] = b.float()
            size = float(difference.norm())
            if size:
                first = min(first, place.layer)
                left = max(left, float((difference - b @ a).norm()) / size)
        linears = {f"{place.linear}.weight" for place in places(model, adapt)}
        others = list(_different(before, after, sorted({*rest} - linears)))
        if 0 < first < model.layers:
            adapt = adapt.model_copy(update={"first_layer": first})
            kept = tuple(f"{place.linear}." for place in places(model, adapt))
            tensors = {name: values for name, values in tensors.items() if name.startswith(kept)}
        tensors |= {name: whole_tensor(after, key(WEIGHTS, name)) for name in head}
    write_adapter(target, LoadedAdapter(Adapted(adapt, origin, task), model, tensors))
    return left, others


def _factors(difference: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return two matrices of equal norm, A [rank, inputs] and B [outputs, rank], whose product B A
    is nearest to the matrix `difference` [outputs, inputs] among all matrices of this rank. If the
    difference has fewer than `rank` singular values, A and B are padded with zeros."""
    u, s, v = torch.linalg.svd(difference, full_matrices=False)
    held = min(rank, len(s))
    root = s[:held].sqrt()
    a = difference.new_zeros(rank, difference.shape[1])
    b = difference.new_zeros(difference.shape[0], rank)
    a[:held] = root[:, None] * v[:held]
    b[:, :held] = u[:, :held] * root
    return a, b


def _require_same_shapes(before: Reader, after: Reader, names: Sequence[str]) -> None:
    """Raise InputError unless the base model has the weights `names` of the tuned model, in the
    same shapes. The base model may have more learned positions than the tuned model."""
    for name in names:
        rows, *rest = after.manifest[key(WEIGHTS, name)].shape
        there = before.manifest.find(key(WEIGHTS, name))
        if name == POSITIONS and there is not None:
            rows = max(rows, there.shape[0])
        before.require(key(WEIGHTS, name), (rows, *rest))


def _require_rank(rank: int, model: ModelConfig, reader: Reader) -> None:
    """Raise InputError if `rank` is above the smaller dim of every matrix of the model. No
    difference between two such matrices can have this rank."""
    most = 1
    for place in places(model, AdaptConfig(method="lora")):
        inputs = reader.manifest[key(WEIGHTS, f"{place.linear}.weight")].shape[1]
        most = max(most, min(inputs, place.rows.stop - place.rows.start))
    if rank > most:
        raise InputError(
            f"--rank {rank}: no matrix of the model has such a rank; legal: 1 to {most}"
        )


def _different(before: Reader, after: Reader, names: Sequence[str]) -> Iterator[str]:
    """Yield the names among `names` whose parameters differ between the models `before` and
    `after`."""
    for name in names:
        rows = slice(0, after.manifest[key(WEIGHTS, name)].shape[0])
        if bool(_difference(before, after, name, rows).any()):
            yield name


def _difference(before: Reader, after: Reader, name: str, rows: slice) -> Tensor:
    """Return some rows of a weight of the tuned model, minus the same rows of the base model, in
    float64."""
    stored = key(WEIGHTS, name)
    box = Box.whole(after.manifest[stored].shape).rows(rows.start, rows.stop)
    old = torch.from_numpy(_read(before, stored, box)).double()
    return torch.from_numpy(_read(after, stored, box)).double() - old


def whole_tensor(reader: Reader, name: str) -> Tensor:
    """Return a full tensor of a checkpoint. Raise InputError if the tensor is damaged."""
    return torch.from_numpy(_read(reader, name, Box.whole(reader.manifest[name].shape)))


def _read(reader: Reader, name: str, box: Box) -> Array:
    """Return a slice of a tensor of a checkpoint. Raise InputError if the slice is damaged."""
    values = np.empty(box.size, reader.manifest[name].dtype)
    try:
        reader.read(name, box, values)
    except Damaged as error:
        raise InputError(str(error)) from None
    return values


def _numpy(values: Tensor) -> Array:
    return values.float().contiguous().numpy()


def _write_config(path: Path, stored: StoredModel, config: Config) -> None:
    """Write a config.toml with the model and the task of `config`, and with the sections
    [precision] and [data] of the base model."""
    import tomlkit

    tree: dict[str, Any] = {
        name: stored.tree[name] for name in ("precision", "data") if name in stored.tree
    }
    tree["model"] = {
        k: value for k, value in config.model.model_dump().items() if value is not None
    }
    if config.task.kind != "none":
        task = config.task.model_dump() | {"labels": list(config.task.labels)}
        task["tokenizer"] = config.task.tokenizer or _tokenizer_of(stored)
        tree["task"] = {name: value for name, value in task.items() if value}
    write_whole(path, tomlkit.dumps(tree))


def own_template(adapter: StoredAdapter) -> tuple[Path | None, str]:
    """Return the file with the chat template of the conversations on which the adapter was trained,
    and "". If the adapter has no template, return None in place of the file. If the template cannot
    be found, return None and a note that gives the reason."""
    # import this module only here: it imports h5py, which is needed only for adapters that have
    # shards
    from ptdmpi.inference.tokenizer import template_file

    try:
        return template_file(adapter), ""
    except InputError as error:
        return None, f"no {TEMPLATE} of the adapter is written: {error}"


def _template(stored: StoredModel, adapter: StoredAdapter) -> tuple[Path | None, str]:
    """Return the file with the chat template for the merged model, and a note if the adapter's
    template cannot be found. The file is the adapter's template if there is one, and otherwise the
    template of the base model. The file is None if neither the adapter nor the base model has a
    template."""
    template, note = own_template(adapter)
    own = stored.path / TEMPLATE
    if template is None and own.is_file():
        template = own
    return template, note


def _tokenizer_of(stored: StoredModel) -> str:
    """Return the name of the base model's tokenizer for the section [task]. Return "" if the
    tokenizer is in the model's own directory, or is unknown."""
    # import this module only here: it imports h5py, which is needed only for models that have
    # shards
    from ptdmpi.inference.text import name_of

    if (stored.path / KEPT).is_dir():
        return ""
    try:
        return name_of(stored)
    except InputError:
        return ""


def size_of(tensors: Tensors) -> int:
    """Return the number of elements of the given tensors, summed over all tensors."""
    return sum(math.prod(values.shape) for values in tensors.values())
