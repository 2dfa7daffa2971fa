"""Checks of checkpoints, which need no model, no MPI and no GPU: whether a checkpoint is undamaged,
and whether two checkpoints are equal."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptdmpi.base.box import Box, rows_of
from ptdmpi.base.disk import open_file
from ptdmpi.base.hub import is_hub_name, local_model
from ptdmpi.base.progress import progress
from ptdmpi.base.say import warn
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.boxes import Array, Damaged, Reader, header
from ptdmpi.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    StoredTensor,
    read_manifest,
    sound_manifest,
)
from ptdmpi.config import InputError

# Two tensors are compared block by block; this is the size of a block in bytes.
SLAB_BYTES = 1 << 25


def checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints that `path` names, in ascending order of steps. `path` is a
    checkpoint, the file `latest` or `best`, a run directory, or its folder `checkpoints/`. `path`
    may also be the name of a model on the Hugging Face hub, if the converted checkpoint of this
    model is in the user's cache. Raise InputError if there is no checkpoint, or if `path` cannot be
    read."""
    try:
        return _checkpoints(path)
    except OSError as error:
        raise InputError(f"{error.filename or path}: {error.strerror}") from None


def _checkpoints(path: Path) -> list[Path]:
    path = files.named(local_model(path))
    if (path / MANIFEST).exists() or files.is_name(path.name):
        if not path.is_dir():
            raise InputError(f"{path}: no such checkpoint")
        return [path]
    for folder in (path / "checkpoints", path):
        in_folder = files.checkpoints_in(folder)
        if in_folder:
            return in_folder
    hint = ""
    if (path / "config.json").is_file():
        hint = "; ptdmpi convert from-hf takes a model of Hugging Face"
    elif is_hub_name(str(path)):
        hint = f"; for a model on the Hugging Face hub, first run ptdmpi convert from-hf {path}"
    raise InputError(f"{path} is no checkpoint, and no run directory with checkpoints{hint}")


def newest(path: Path) -> Path:
    """Return the newest complete checkpoint that `path` names. If newer checkpoints are damaged,
    print a warning that names their steps. Raise InputError if no checkpoint is complete."""
    damage: list[tuple[Path, InputError]] = []
    for checkpoint in reversed(checkpoints(path)):
        try:
            sound_manifest(checkpoint)
        except InputError as error:
            damage.append((checkpoint, error))
            continue
        if damage:
            skipped = ", ".join(
                f"step {files.step_of(newer)} is damaged ({why})" for newer, why in damage
            )
            warn(f"{path}: {skipped}; step {files.step_of(checkpoint)} is used")
        return checkpoint
    raise damage[0][1]


# -- verify ----------------------------------------------------------------------------------------


def problems(directory: Path) -> list[str]:
    """Read a checkpoint completely, and return one line for each problem. If the checkpoint is
    undamaged, the list is empty.

    The checks are: the checksum of the manifest; sizes, headers and checksums of the files; and
    whether the pieces of each tensor cover the tensor without a gap or an overlap.
    """
    try:
        manifest = read_manifest(directory)
    except InputError as error:
        return [str(error)]
    lines = []
    for name, tensor in manifest.tensors.items():
        lines += [f"{directory}: {name}: {text}" for text in _uncovered(tensor)]
    for name in manifest.files:
        lines += [f"{directory / name}: {text}" for text in _misfits(directory, name, manifest)]
    size_bytes = manifest.total_bytes
    with Reader(directory, manifest) as reader, progress("verifying", size_bytes, "B") as advance:
        share_bytes = size_bytes / max(1, len(reader.pieces))
        for number in range(len(reader.pieces)):
            try:
                reader.check(number)
            except Damaged as error:
                lines.append(str(error))
            advance(share_bytes)
    return list(dict.fromkeys(lines))


def _uncovered(tensor: StoredTensor) -> Iterator[str]:
    whole = Box.whole(tensor.shape)
    # sort the slices by their first row, because two slices cannot overlap if one begins after the
    # last row of the other
    boxes = sorted((piece.box for piece in tensor.pieces), key=lambda box: box.start[0])
    for number, box in enumerate(boxes):
        if box.overlap(whole) != box:
            yield f"piece {box} is empty or outside of shape {list(tensor.shape)}"
        for other in boxes[number + 1 :]:
            if other.start[0] >= box.stop[0]:
                break
            if box.overlap(other):
                yield f"pieces {box} and {other} overlap"
    # if the pieces do not overlap, and together have as many elements as the tensor, there are no
    # gaps between them
    held = sum(box.elements for box in boxes)
    if held != whole.elements:
        yield f"pieces hold {held} elements of {whole.elements}"


def _misfits(directory: Path, name: str, manifest: Manifest) -> Iterator[str]:
    pieces = sorted(
        (
            (piece, tensor)
            for tensor in manifest.tensors.values()
            for piece in tensor.pieces
            if piece.file == name
        ),
        key=lambda pair: pair[0].offset,
    )
    head = header([(piece.key, tensor.dtype, piece.box.size) for piece, tensor in pieces])
    offset = len(head)
    said = manifest.files[name]
    for piece, tensor in pieces:
        if piece.offset != offset:
            yield f"{piece.key} begins at byte {piece.offset} instead of {offset}"
        offset += tensor.nbytes(piece)
    if said != offset:
        yield f"the manifest says {said} bytes, its pieces take {offset}"
    try:
        with open_file(directory / name, "rb") as stream:
            if stream.read(len(head)) != head:
                yield "its header is damaged"
            size = stream.seek(0, 2)
    except OSError as error:
        yield f"{error.strerror}"
        return
    if size != said:
        yield f"{size} bytes instead of {said}"


# -- diff ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A difference between two checkpoints, either in one tensor or in one value of the run's
    progress, such as the number of steps. `what` describes the difference. For a tensor,
    `greatest_absolute` is the greatest absolute difference of two elements, and `greatest_relative`
    is the same difference divided by the greatest magnitude in the first checkpoint's tensor. Both
    are None if the values cannot be compared.
    """

    name: str
    what: str
    greatest_absolute: float | None = None
    greatest_relative: float | None = None


def differences(first: Path, second: Path) -> list[Difference]:
    """Return the differences between two checkpoints, which may have been written by runs with
    different layouts. The list is empty if all values are bitwise equal.

    Raise InputError if either checkpoint cannot be read.
    """
    manifests = [sound_manifest(path) for path in (first, second)]
    progress = [asdict(manifest.progress) for manifest in manifests]
    different = [
        Difference(f"progress/{key}", f"{progress[0].get(key)} and {progress[1].get(key)}")
        for key in sorted({*progress[0], *progress[1]})
        if progress[0].get(key) != progress[1].get(key)
    ]
    with Reader(first, manifests[0]) as a, Reader(second, manifests[1]) as b:
        kinds = [Counter(_kind(name) for name in reader.tensors) for reader in (a, b)]
        # Kinds of tensors that only one of the two checkpoints has. For example, only one
        # checkpoint has the optimizer's moments if the other checkpoint has only weights.
        alone = kinds[0].keys() ^ kinds[1].keys()
        for kind in sorted(alone):
            for path, numbers in zip((first, second), kinds, strict=True):
                if numbers[kind]:
                    text = f"{kind}/* ({numbers[kind]:,})"
                    different.append(Difference(text, f"only in {path}"))
        for name in sorted(key for key in {*a.tensors, *b.tensors} if _kind(key) not in alone):
            holders = [reader.directory for reader in (a, b) if name in reader.tensors]
            if len(holders) == 1:
                different.append(Difference(name, f"only in {holders[0]}"))
                continue
            try:
                different += _compare(name, a, b)
            except Damaged as error:
                raise InputError(str(error)) from None
    return different


def _kind(name: str) -> str:
    """Return the kind of a stored tensor: "weights", or a kind of optimizer state."""
    return name.partition("/")[0]


def _compare(name: str, a: Reader, b: Reader) -> Iterator[Difference]:
    stored = a.tensors[name]
    other = b.tensors[name]
    if stored.shape != other.shape:
        yield Difference(name, f"shapes {list(stored.shape)} and {list(other.shape)}")
        return
    same_type = stored.dtype == other.dtype
    differing = 0
    absolute = 0.0
    magnitude = 0.0
    for slab in Box.whole(stored.shape).slabs(rows_of(stored.shape, 8, SLAB_BYTES)):
        x = _slab(a, name, slab, stored.dtype)
        y = _slab(b, name, slab, other.dtype)
        unequal = x != y
        if same_type:
            unequal = _bits(x) != _bits(y)
        differing += int(unequal.sum())
        magnitude = max(magnitude, float(np.nan_to_num(np.abs(x), nan=0.0).max()))
        if unequal.any():
            delta = np.abs(x[unequal].astype(np.float64) - y[unequal])
            absolute = max(absolute, float(np.nan_to_num(delta, nan=math.inf).max()))
    if differing or not same_type:
        what = f"{differing} of {math.prod(stored.shape)} elements"
        if not same_type:
            what = f"types {stored.dtype} and {other.dtype}, {what}"
        yield Difference(name, what, absolute, _relative(absolute, magnitude))


def _relative(absolute: float, magnitude: float) -> float:
    """Return the relative difference of two tensors: `absolute`, the greatest absolute difference,
    divided by `magnitude`, the greatest magnitude in the first tensor. If the magnitude is 0,
    return 0 for equal tensors, otherwise infinity.
    """
    if magnitude:
        return absolute / magnitude
    return math.inf if absolute else 0.0


def _slab(reader: Reader, name: str, slab: Box, dtype: str) -> Array:
    values = np.zeros(slab.size, dtype)
    reader.read(name, slab, values)
    return values


def _bits(values: Array) -> Array:
    return values.view(f"u{values.itemsize}")


def as_json(difference: Difference) -> dict[str, Any]:
    """Return a difference as a JSON object. Infinities and NaN become None."""
    values = asdict(difference)
    for key in ("greatest_absolute", "greatest_relative"):
        if values[key] is not None and not math.isfinite(values[key]):
            values[key] = None
    return values
