"""The frozen model beneath adapters: its weights into a rank of any layout, and which they are."""

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
    """SHA-256 over what the manifest says of the weights: names, shapes, types, boxes and their
    checksums, or of the codes and scales of those in few bits. Each box is held against its
    checksum when it is read, so this is of the values, too, without reading them twice; the same
    values in other boxes count as other ones."""
    found: list[Any] = [
        (name, one.shape, one.dtype, sorted((p.box.start, p.box.stop, p.crc32) for p in one.pieces))
        for name, one in sorted(manifest.tensors.items())
        if name.partition("/")[0].partition("@")[0] in (WEIGHTS, KIND_OF_CODES, KIND_OF_SCALES)
    ]
    if manifest.form is not None:
        found.append(astuple(manifest.form))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def base_at(path: Path, form: LowBit | None = None) -> tuple[Path, Base]:
    """The newest complete checkpoint that `path` names, and what it is. Raises InputError, also
    where its matrices are not of this `form`; None: of any."""
    directory = newest(path)
    manifest = sound_manifest(directory)
    if form is not None and manifest.form != form:
        found, legal = "in full", 'weights = "none", or a base that `ptdmpi quantize` has made'
        if manifest.form is not None:
            found, legal = f"in {_words(manifest.form)}", "both left out: the base says what it is"
        raise InputError(
            f"quantize.weights and block ask for a frozen base in {_words(form)}, and {directory} "
            f"has its matrices {found}; legal: {legal}"
        )
    return directory, Base(str(directory), fingerprint(manifest))


def form_at(path: Path) -> LowBit | None:
    """What the matrices of the newest complete checkpoint that `path` names are; None: they stand
    there in full. Raises InputError."""
    return sound_manifest(newest(path)).form


def base_told(config: Config) -> Iterator[str]:
    """What is said of a frozen base that stays in few bits."""
    form, compute = LowBit.of(config.quantize), config.precision.compute
    if form is None or not config.adapt.adapts:
        return
    elements, packed = (config.model.layers * count for count in frozen_layer(config.model, 1))
    yield (
        f"the frozen base stays in {_words(form)}: its layers' matrices take {file_size(packed)}, "
        f"which would be {file_size(elements * PRECISIONS[compute].compute.bytes)} in {compute}"
    )


def _words(form: LowBit) -> str:
    """ "nf4, blocks of 64"."""
    return f"{form.codes}, blocks of {form.block}"


def take_base(
    state: State, world: Communicator, course: Course, tokenizer_sha256: str | None
) -> list[str]:
    """Load the frozen weights from what `adapt.base` names, and have the course know them; of a
    head for a task, which trains, what there is of it. Returns what there is not, as it was drawn.
    Raises InputError on every rank. `tokenizer_sha256`: of the tokenizer that they know, where
    their checkpoint does not say so."""
    path, form = Path(course.config.adapt.base), LowBit.of(course.config.quantize)
    head = task_head(course.config.model)
    directory, base = on_root(world, lambda: base_at(path, form))

    def judge(where: Path, manifest: Manifest) -> None:
        course.stand_on(base, where, manifest.said, tokenizer_sha256)

    loaded = load_frozen(state, world, directory, judge, head)
    if isinstance(loaded, str):
        raise SharedInputError(f"adapt.base = {path}: {loaded}")
    return drawn(loaded, head)
