"""The frozen base model to which adapters are added. This module loads the base model's weights
into a rank of any layout, and identifies the base model by a hash."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

from ptdmpi.base.words import file_size
from ptdmpi.checkpoint.examine import newest
from ptdmpi.checkpoint.load import drawn, load_frozen, on_root
from ptdmpi.checkpoint.manifest import Manifest, sound_manifest
from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import Config, InputError, SharedInputError
from ptdmpi.config.precision import PRECISIONS
from ptdmpi.lineage.adapted import Base
from ptdmpi.lineage.course import Course
from ptdmpi.model.state import WEIGHTS, State
from ptdmpi.plan.layer.low_bit import KIND_OF_CODES, KIND_OF_SCALES, LowBit
from ptdmpi.plan.shape.parameters import frozen_layer, task_head


def fingerprint(manifest: Manifest) -> str:
    """Return a SHA-256 hash of the manifest's entries about the weights: their names, shapes,
    types, slices and checksums. For quantized weights, the hash covers the entries of their codes
    and scales. The checksums identify the values of the weights, so the weights need not be read
    for the hash. The hash changes if the same weights are stored in slices of other shapes."""
    described: list[Any] = []
    for name, tensor in sorted(manifest.tensors.items()):
        if name.partition("/")[0].partition("@")[0] in (WEIGHTS, KIND_OF_CODES, KIND_OF_SCALES):
            pieces = sorted((p.box.start, p.box.stop, p.crc32) for p in tensor.pieces)
            described.append((name, tensor.shape, tensor.dtype, pieces))
    if manifest.form is not None:
        described.append(astuple(manifest.form))
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def base_at(path: Path, form: LowBit | None = None) -> tuple[Path, Base]:
    """Return the newest complete checkpoint that `path` names, and a `Base` that identifies its
    weights. Raise InputError if there is no checkpoint, or if the matrices of the checkpoint are
    not quantized in the format `form`. If `form` is None, the matrices may have any format, or not
    be quantized."""
    directory = newest(path)
    manifest = sound_manifest(directory)
    if form is not None and manifest.form != form:
        stored = "in full"
        legal = 'weights = "none", or a base that `ptdmpi quantize` has made'
        if manifest.form is not None:
            stored = f"in {_words(manifest.form)}"
            legal = "neither key, so that the base determines both"
        raise InputError(
            f"quantize.weights and quantize.block require a frozen base in {_words(form)}, but "
            f"{directory} stores its matrices {stored}; legal: {legal}"
        )
    return directory, Base(str(directory), fingerprint(manifest))


def form_at(path: Path) -> LowBit | None:
    """Return the quantized format of the matrices in the newest complete checkpoint that `path`
    names; None if the matrices are not quantized. Raise InputError if there is no complete
    checkpoint."""
    return sound_manifest(newest(path)).form


def base_told(config: Config) -> Iterator[str]:
    """If the frozen base model of a run stays quantized in memory, yield a log line about it."""
    form = LowBit.of(config.quantize)
    compute = config.precision.compute
    if form is None or not config.adapt.adapts:
        return
    elements, packed = (config.model.layers * count for count in frozen_layer(config.model, 1))
    yield (
        f"the frozen base stays in {_words(form)}: its layers' matrices take {file_size(packed)}, "
        f"which would be {file_size(elements * PRECISIONS[compute].compute.bytes)} in {compute}"
    )


def _words(form: LowBit) -> str:
    """Return a text that describes a quantized format, such as "nf4, blocks of 64"."""
    return f"{form.codes}, blocks of {form.block}"


def take_base(
    state: State, world: Communicator, course: Course, tokenizer_sha256: str | None
) -> list[str]:
    """Load the frozen weights of the checkpoint `adapt.base`. Record in `course`, the description
    of the run, which checkpoint the base model came from. If the checkpoint has a head for the
    task, also load the parameters of the head. The head is not frozen: its training begins from the
    loaded parameters. Return the names of the parameters of the head that keep their initial
    values.

    `tokenizer_sha256` is the hash of the base model's tokenizer, or None if the caller does not
    know it. This argument is used only if the checkpoint does not record its tokenizer. Raise
    InputError, on every rank, if the checkpoint cannot be used.
    """
    path = Path(course.config.adapt.base)
    form = LowBit.of(course.config.quantize)
    head = task_head(course.config.model)
    directory, base = on_root(world, lambda: base_at(path, form))

    def judge(where: Path, manifest: Manifest) -> None:
        """Raise InputError if this run may not train adapters on the base model in the directory
        `where`.
        """
        course.stand_on(base, where, manifest.said, tokenizer_sha256)

    loaded = load_frozen(state, world, directory, judge=judge, head=head)
    if isinstance(loaded, str):
        raise SharedInputError(f"adapt.base = {path}: {loaded}")
    return drawn(loaded, head)
