"""Examining checkpoints without a model, MPI or a GPU: are they sound, and are they equal."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptdmpi.base.box import Box, rows_of
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.boxes import Array, Damaged, Reader, header
from ptdmpi.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    StoredTensor,
    is_sound,
    read_manifest,
    sound_manifest,
)
from ptdmpi.config import InputError
from ptdmpi.terminal.progress import progress

# So much of a tensor is compared at a time.
SLAB_BYTES = 1 << 25


def checkpoints(path: Path) -> list[Path]:
    """The checkpoints that `path` names, in ascending order of steps: one itself, `latest`, or all
    of a run or of its `checkpoints/`. Raises InputError if there is none, or it may not be read."""
    try:
        return _checkpoints(path)
    except OSError as error:
        raise InputError(f"{error.filename or path}: {error.strerror}") from None


def _checkpoints(path: Path) -> list[Path]:
    path = files.named(path)
    if (path / MANIFEST).exists() or files.is_name(path.name):
        if not path.is_dir():
            raise InputError(f"{path}: no such checkpoint")
        return [path]
    for folder in (path / "checkpoints", path):
        found = files.checkpoints_in(folder)
        if found:
            return found
    foreign = (path / "config.json").is_file()
    hint = "; ptdmpi convert from-hf takes a model of Hugging Face" if foreign else ""
    raise InputError(f"{path} is no checkpoint, and no run directory with checkpoints{hint}")


def newest(path: Path) -> Path:
    """The newest sound checkpoint that `path` names. Raises InputError."""
    found = checkpoints(path)
    sound = next((one for one in reversed(found) if is_sound(one)), found[-1])
    sound_manifest(sound)
    return sound


# -- verify ----------------------------------------------------------------------------------------


def problems(directory: Path) -> list[str]:
    """Everything that is wrong with a checkpoint: reads all of it.

    Checked are the manifest's own checksum, sizes, headers and checksums of the files, and that the
    pieces of each tensor cover it without gap or overlap.
    """
    try:
        manifest = read_manifest(directory)
    except InputError as error:
        return [str(error)]
    found = []
    for name, tensor in manifest.tensors.items():
        found += [f"{directory}: {name}: {text}" for text in _uncovered(tensor)]
    for name in manifest.files:
        found += [f"{directory / name}: {text}" for text in _misfits(directory, name, manifest)]
    size_bytes = manifest.total_bytes
    with Reader(directory, manifest) as reader, progress("verifying", size_bytes, "B") as advance:
        share_bytes = size_bytes / max(1, len(reader.pieces))
        for number in range(len(reader.pieces)):
            try:
                reader.check(number)
            except Damaged as error:
                found.append(str(error))
            advance(share_bytes)
    return list(dict.fromkeys(found))


def _uncovered(tensor: StoredTensor) -> Iterator[str]:
    whole = Box.whole(tensor.shape)
    # by their first row: a box overlaps no other that begins behind its last one
    boxes = sorted((piece.box for piece in tensor.pieces), key=lambda box: box.start[0])
    for number, box in enumerate(boxes):
        if box.overlap(whole) != box:
            yield f"piece {box} is empty or outside of shape {list(tensor.shape)}"
        for other in boxes[number + 1 :]:
            if other.start[0] >= box.stop[0]:
                break
            if box.overlap(other):
                yield f"pieces {box} and {other} overlap"
    # no overlap and as many elements as the tensor: then there is no gap either
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
        key=lambda found: found[0].offset,
    )
    head = header([(piece.key, tensor.dtype, piece.box.size) for piece, tensor in pieces])
    offset, said = len(head), manifest.files[name]
    for piece, tensor in pieces:
        if piece.offset != offset:
            yield f"{piece.key} stands at byte {piece.offset} instead of {offset}"
        offset += tensor.nbytes(piece)
    if said != offset:
        yield f"the manifest says {said} bytes, its pieces take {offset}"
    try:
        with open(directory / name, "rb") as stream:
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
    """How one tensor (or value of the progress) differs. `greatest_absolute` of all elements, and
    `greatest_relative`: that over the greatest magnitude in the first checkpoint; None where values
    cannot be compared."""

    name: str
    what: str
    greatest_absolute: float | None = None
    greatest_relative: float | None = None


def differences(first: Path, second: Path) -> list[Difference]:
    """Where two checkpoints differ, whatever layouts wrote them; none where all bits are equal.

    Raises InputError if one of them cannot be read.
    """
    manifests = [sound_manifest(path) for path in (first, second)]
    progress = [asdict(manifest.progress) for manifest in manifests]
    found = [
        Difference(f"progress/{key}", f"{progress[0].get(key)} and {progress[1].get(key)}")
        for key in sorted({*progress[0], *progress[1]})
        if progress[0].get(key) != progress[1].get(key)
    ]
    with Reader(first, manifests[0]) as a, Reader(second, manifests[1]) as b:
        kinds = [Counter(_kind(name) for name in reader.tensors) for reader in (a, b)]
        alone = kinds[0].keys() ^ kinds[1].keys()  # as the optimizer's, which a mere model has not
        for kind in sorted(alone):
            path, number = (first, kinds[0][kind]) if kinds[0][kind] else (second, kinds[1][kind])
            found.append(Difference(f"{kind}/* ({number:,})", f"only in {path}"))
        for name in sorted(one for one in {*a.tensors, *b.tensors} if _kind(one) not in alone):
            if name not in a.tensors or name not in b.tensors:
                found.append(Difference(name, f"only in {first if name in a.tensors else second}"))
                continue
            try:
                found += _compare(name, a, b)
            except Damaged as error:
                raise InputError(str(error)) from None
    return found


def _kind(name: str) -> str:
    """What a tensor is of its parameter: "weights", a moment of the optimizer."""
    return name.partition("/")[0]


def _compare(name: str, a: Reader, b: Reader) -> Iterator[Difference]:
    one, other = a.tensors[name], b.tensors[name]
    if one.shape != other.shape:
        yield Difference(name, f"shapes {list(one.shape)} and {list(other.shape)}")
        return
    same_type = one.dtype == other.dtype
    differing, absolute, magnitude = 0, 0.0, 0.0
    for slab in Box.whole(one.shape).slabs(rows_of(one.shape, 8, SLAB_BYTES)):
        x, y = _slab(a, name, slab, one.dtype), _slab(b, name, slab, other.dtype)
        unequal = _bits(x) != _bits(y) if same_type else x != y
        differing += int(unequal.sum())
        magnitude = max(magnitude, float(np.nan_to_num(np.abs(x), nan=0.0).max()))
        if unequal.any():
            delta = np.abs(x[unequal].astype(np.float64) - y[unequal])
            absolute = max(absolute, float(np.nan_to_num(delta, nan=math.inf).max()))
    if differing or not same_type:
        what = f"{differing} of {math.prod(one.shape)} elements"
        if not same_type:
            what = f"types {one.dtype} and {other.dtype}, {what}"
        relative = absolute / magnitude if magnitude else (math.inf if absolute else 0.0)
        yield Difference(name, what, absolute, relative)


def _slab(reader: Reader, name: str, slab: Box, dtype: str) -> Array:
    values = np.zeros(slab.size, dtype)
    reader.read(name, slab, values)
    return values


def _bits(values: Array) -> Array:
    return values.view(f"u{values.itemsize}")


def as_json(difference: Difference) -> dict[str, Any]:
    """With None for what JSON has no number for."""
    values = asdict(difference)
    for key in ("greatest_absolute", "greatest_relative"):
        if values[key] is not None and not math.isfinite(values[key]):
            values[key] = None
    return values
