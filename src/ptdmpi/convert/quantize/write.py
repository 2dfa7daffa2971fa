"""Quantizing a checkpoint. The result is a directory with the layout of a run directory; its
checkpoint has quantized weights."""

import contextlib
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptdmpi.base.box import Box
from ptdmpi.base.near import divisors, nearest
from ptdmpi.base.progress import progress
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint import examine
from ptdmpi.checkpoint.boxes import Array, Damaged, Outgoing, Reader, write
from ptdmpi.checkpoint.manifest import CODES, QUANTIZATION, SCALES, write_manifest
from ptdmpi.config import InputError, ModelConfig
from ptdmpi.config.kinds import LayerKind
from ptdmpi.convert.folder import new_directory
from ptdmpi.convert.quantize.calibration import Calibration, CalibrationSamples
from ptdmpi.convert.quantize.gptq import gptq
from ptdmpi.convert.tensors import slabs
from ptdmpi.inference.stored import (
    CONFIG,
    KEPT,
    StoredModel,
    declarations,
    loaded_layer,
    open_model,
    require_weights,
)
from ptdmpi.model.low_bit.codes import Packed, packed
from ptdmpi.model.state import WEIGHTS, key
from ptdmpi.plan.layer.low_bit import LowBit
from ptdmpi.plan.layer.parts import Linear
from ptdmpi.plan.shape import parameters

Json = Mapping[str, Any]
# The keys of a manifest that describe the weights themselves. The new manifest gets new values for
# these keys, so they are not copied from the original manifest.
OWN = ("format_version", "progress", "model", QUANTIZATION)


@dataclass(frozen=True)
class Quantized:
    """The result of a quantization. `elements` is the number of elements of all quantized matrices.
    `bytes_before` is the size in bytes of all weights as float32, and `bytes` is the size of the
    new weight file."""

    path: Path
    codes: str
    block: int
    method: str
    matrices: int
    elements: int
    bits_per_element: float
    bytes_before: int
    bytes: int


def quantize(
    source: Path,
    target: Path,
    form: LowBit,
    *,
    samples: CalibrationSamples | None = None,
    kind: str = WEIGHTS,
) -> Quantized:
    """Quantize the matrices of all layers in the newest checkpoint at `source`, and write the model
    at `target`.

    Without calibration `samples`, each element is rounded to the nearest level (the method absmax).
    With `samples`, the matrices are quantized by `gptq`. Embedding tables, norms, biases, routers
    and the head are copied. `kind` selects the stored values that are quantized: the trained
    weights, or the moving average of the weights. Raise InputError if the checkpoint is damaged or
    already quantized, or if the format does not fit the model; then `target` is not written.
    """
    stored = open_model(source, kind)
    if stored.manifest.form is not None:
        form = stored.manifest.form
        raise InputError(
            f"{stored.checkpoint} is quantized already: {form.codes}, blocks of {form.block}; "
            "legal: the model that it was made from"
        )
    config = stored.config()
    _require_block(config.model, form)
    needed = declarations(config, stored.vocab_size)
    chosen = matrices(config.model)
    damaged = examine.problems(stored.checkpoint)
    if damaged:
        raise InputError(f"checkpoint {stored.checkpoint} is damaged: {damaged[0]}")
    shapes = {name: needed[name].shape for name in chosen}
    before = sum(math.prod(declaration.shape) for declaration in needed.values()) * 4
    with new_directory(target) as folder, stored.reader() as reader:
        require_weights(reader, needed)
        maker = Maker(stored, reader, form, samples)
        parts = [*_others(reader, needed.keys() - chosen), *_packed_parts(maker, shapes)]
        size = sum(part.nbytes for part in parts)
        files.require_space(folder, size)
        _write(folder, stored, parts, maker.description)
        shutil.copyfile(stored.path / CONFIG, folder / CONFIG)
        if (stored.path / KEPT).is_dir():
            shutil.copytree(stored.path / KEPT, folder / KEPT)
    return Quantized(
        path=target,
        codes=form.codes,
        block=form.block,
        method=maker.description["method"],
        matrices=len(chosen),
        elements=sum(map(math.prod, shapes.values())),
        bits_per_element=form.bits_per_element,
        bytes_before=before,
        bytes=size,
    )


def matrices(model: ModelConfig) -> list[str]:
    """Return the logical names of the weights to quantize: the weights of the linear layers in all
    transformer layers, without routers."""
    return [
        f"layers.{i}.{name}.weight"
        for i in range(model.layers)
        for name in _linears(model, model.kind_of(i))
    ]


def _linears(model: ModelConfig, kind: LayerKind) -> dict[str, Linear]:
    """Return the linears of a layer of kind `kind` whose weights are quantized, by name. Routers
    compute in float32, so their weights are not quantized."""
    parts = parameters.layer(model, kind).items()
    return {
        name: part
        for name, part in parts
        if isinstance(part, Linear) and not parameters.is_of_router(name)
    }


def _require_block(model: ModelConfig, form: LowBit) -> None:
    """Raise InputError if the block size is odd, or does not divide the length of the rows of a
    matrix."""
    kinds = {run.kind for run in model.runs()}
    widths = {part.inputs for kind in kinds for part in _linears(model, kind).values()}
    if form.block % 2 or any(width % form.block for width in widths):
        legal = [n for n in divisors(math.gcd(*widths)) if n % 2 == 0]
        choice = "legal: none here"
        if legal:
            choice = f"legal nearby: {nearest(form.block, legal)}"
        raise InputError(
            f"--block {form.block} is not even, or does not divide the rows of all matrices "
            f"({', '.join(map(str, sorted(widths)))}); {choice}"
        )


class Maker:
    """An object that computes the quantized matrices of a model. Each matrix is computed when it is
    requested. The matrices must be requested in the order of the layers, because GPTQ needs the
    outputs of the earlier layers after their quantization.

    `description` is the entry QUANTIZATION of the manifest, with the format and the method.
    """

    def __init__(
        self, stored: StoredModel, reader: Reader, form: LowBit, samples: CalibrationSamples | None
    ) -> None:
        self.reader = reader
        self.form = form
        self.description: dict[str, Any] = {"codes": form.codes, "block": form.block}
        self.description["method"] = "absmax" if samples is None else "gptq"
        self.samples: Calibration | None = None
        if samples is not None:
            self.samples = Calibration(stored, samples.read(stored))
            self.description |= {"samples": samples.count, "sample_tokens": samples.length}
        # the matrix that was requested last; with samples, all matrices of its layer
        self._made: dict[str, Packed] = {}

    def matrix(self, name: str) -> Packed:
        """Return a quantized matrix. Raise InputError for weights, or calibration inputs, that are
        not finite."""
        if name not in self._made:
            if self.samples is None:
                self._made = {name: packed(self._read(name), self.form)}
            else:
                self._made = self._layer(self.samples, int(name.split(".")[1]))
        return self._made[name]

    def _read(self, name: str) -> Tensor:
        """Return a matrix of the checkpoint. Raise InputError if the matrix is damaged or not
        finite."""
        stored = self.reader.manifest[key(WEIGHTS, name)]
        values = np.empty(stored.shape, stored.dtype)
        _fill(self.reader, name, Box.whole(stored.shape), values)
        return self._finite(torch.from_numpy(values), key(WEIGHTS, name))

    def _finite(self, values: Tensor, what: str) -> Tensor:
        """Return `values`. Raise InputError, with the name `what`, if the values are not finite."""
        if not values.isfinite().all():
            raise InputError(
                f"checkpoint {self.reader.directory}: {what}: inf or NaN, which codes cannot "
                "represent; legal: finite weights"
            )
        return values

    def _layer(self, samples: Calibration, number: int) -> dict[str, Packed]:
        """Return all matrices of a layer, quantized by `gptq`. Also compute the samples'
        activations after the quantized layer."""
        names = [name for name in matrices(samples.config.model) if _is_of(name, number)]
        with _as_input_error():
            stage, buffer = loaded_layer(samples.config, samples.vocab_size, number, self.reader)
        weights = {name: buffer.entries[name].view(buffer.weights) for name in names}
        hessians = samples.hessians(stage, [name.removesuffix(".weight") for name in names])
        made = {}
        for name, weight in weights.items():
            hessian = hessians[name.removesuffix(".weight")]
            self._finite(weight, key(WEIGHTS, name))
            self._finite(hessian, f"the inputs of {name} on the samples")
            made[name] = gptq(weight, hessian, self.form)
            weight.copy_(made[name].values(torch.float32))
        samples.advance(stage)
        return made


def _is_of(name: str, layer: int) -> bool:
    return name.startswith(f"layers.{layer}.")


@contextlib.contextmanager
def _as_input_error() -> Iterator[None]:
    """Run the `with` block, and raise InputError in place of the error Damaged, because the user
    can replace the damaged file."""
    try:
        yield
    except Damaged as error:
        raise InputError(str(error)) from None


def _fill(reader: Reader, name: str, box: Box, values: Array) -> Array:
    """Read a slice of a weight into `values`, and return `values`. Raise InputError if the slice is
    damaged."""
    with _as_input_error():
        reader.read(key(WEIGHTS, name), box, values)
    return values


def _others(reader: Reader, names: Iterable[str]) -> Iterator[Outgoing]:
    """Yield the weights that are not quantized, in blocks of complete rows."""
    for name in sorted(names):
        stored = reader.manifest[key(WEIGHTS, name)]
        for box in slabs(stored.shape, np.dtype(stored.dtype).itemsize):
            values = partial(_read_box, reader, name, box, stored.dtype)
            yield Outgoing(
                tensor=key(WEIGHTS, name),
                shape=stored.shape,
                box=box,
                dtype=stored.dtype,
                values=values,
            )


def _read_box(reader: Reader, name: str, box: Box, dtype: str) -> Array:
    return _fill(reader, name, box, np.empty(box.size, dtype))


def _packed_parts(maker: Maker, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Outgoing]:
    """Yield the codes and the scales of each matrix, one matrix after the other."""
    for name, (rows, columns) in shapes.items():
        codes = maker.form.code_shape(rows, columns)
        yield _part(CODES + name, codes, "uint8", partial(_codes, maker, name))
        scales = maker.form.scale_shape(rows, columns)
        yield _part(SCALES + name, scales, "float32", partial(_scales, maker, name))


def _part(name: str, shape: tuple[int, int], dtype: str, values: Callable[[], Array]) -> Outgoing:
    return Outgoing(tensor=name, shape=shape, box=Box.whole(shape), dtype=dtype, values=values)


def _codes(maker: Maker, name: str) -> Array:
    return maker.matrix(name).codes.numpy()


def _scales(maker: Maker, name: str) -> Array:
    return maker.matrix(name).scales.numpy()


def _write(folder: Path, stored: StoredModel, parts: list[Outgoing], description: Json) -> None:
    """Write a checkpoint that contains only weights. The new checkpoint has the step and the
    history of the original checkpoint."""
    directory = folder / "checkpoints"
    temporary = directory / (files.name_of(stored.step) + ".tmp")
    temporary.mkdir(parents=True)
    with progress("quantizing", sum(part.nbytes for part in parts), "B") as advance:
        shown = [replace(part, values=partial(_advanced, part, advance)) for part in parts]
        written = write(temporary / "rank-00000.safetensors", shown)
    manifest = stored.manifest
    lineage = {name: value for name, value in manifest.said.items() if name not in OWN}
    lineage[QUANTIZATION] = dict(description)
    model = manifest.said["model"]
    write_manifest(temporary, manifest.progress, model, written=[written], lineage=lineage)
    files.publish(temporary)


def _advanced(part: Outgoing, advance: Callable[[float], object]) -> Array:
    """Return the values that an entry of the checkpoint will contain, and advance the progress
    display."""
    values = part.values()
    advance(part.nbytes)
    return values
