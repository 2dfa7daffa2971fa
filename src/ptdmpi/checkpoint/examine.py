"""Examining checkpoints without a model, MPI or a GPU: are they sound, and are they equal."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.boxes import Damaged, Reader, Slices, box_of, header, piece_bytes
from ptdmpi.config import InputError
from ptdmpi.terminal.progress import progress

# So much of a tensor is compared at a time.
SLAB_BYTES = 1 << 25


def checkpoints(path: Path) -> list[Path]:
    """The checkpoints that `path` names, in ascending order of steps: one itself, `latest`, or all
    of a run or of its `checkpoints/`. Raises InputError if there is none."""
    path = files.named(path)
    if (path / files.MANIFEST).exists() or files.is_name(path.name):
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
    sound = next((one for one in reversed(found) if files.is_sound(one)), found[-1])
    files.sound_manifest(sound)
    return sound


# -- verify ----------------------------------------------------------------------------------------


def problems(directory: Path) -> list[str]:
    """Everything that is wrong with a checkpoint: reads all of it.

    Checked are the manifest's own checksum, sizes, headers and checksums of the files, and that the
    pieces of each tensor cover it without gap or overlap.
    """
    try:
        manifest = files.read_manifest(directory)
    except InputError as error:
        return [str(error)]
    found = []
    for name, tensor in manifest["tensors"].items():
        found += [f"{directory}: {name}: {text}" for text in _uncovered(tensor)]
    for name, file in manifest["files"].items():
        found += [
            f"{directory / name}: {text}" for text in _misfits(directory, name, file, manifest)
        ]
    size_bytes = sum(file["bytes"] for file in manifest["files"].values())
    with Reader(directory, manifest) as reader, progress("verifying", size_bytes, "B") as advance:
        share_bytes = size_bytes / max(1, len(reader.pieces))
        for number in range(len(reader.pieces)):
            try:
                reader.check(number)
            except Damaged as error:
                found.append(str(error))
            advance(share_bytes)
    return list(dict.fromkeys(found))


def _uncovered(tensor: dict[str, Any]) -> Iterator[str]:
    boxes = sorted((box_of(piece) for piece in tensor["pieces"]), key=lambda box: box[0].start)
    for box in boxes:
        for part, size in zip(box, tensor["shape"], strict=True):
            if not 0 <= part.start < part.stop <= size:
                yield f"piece {_text(box)} is empty or outside of shape {tensor['shape']}"
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if other[0].start >= box[0].stop:
                break
            if all(a.start < b.stop and b.start < a.stop for a, b in zip(box, other, strict=True)):
                yield f"pieces {_text(box)} and {_text(other)} overlap"
    held = sum(math.prod(part.stop - part.start for part in box) for box in boxes)
    if held != math.prod(tensor["shape"]):
        yield f"pieces hold {held} elements of {math.prod(tensor['shape'])}"


def _misfits(
    directory: Path, name: str, file: dict[str, Any], manifest: dict[str, Any]
) -> Iterator[str]:
    pieces = sorted(
        (
            (piece["offset"], piece, tensor["dtype"])
            for tensor in manifest["tensors"].values()
            for piece in tensor["pieces"]
            if piece["file"] == name
        ),
        key=lambda found: found[0],
    )
    sizes = [tuple(part.stop - part.start for part in box_of(piece)) for _, piece, _ in pieces]
    head = header(
        [(p["key"], dtype, size) for (_, p, dtype), size in zip(pieces, sizes, strict=True)]
    )
    offset = len(head)
    for start, piece, dtype in pieces:
        if start != offset:
            yield f"{piece['key']} stands at byte {start} instead of {offset}"
        offset += piece_bytes(piece, dtype)
    if file["bytes"] != offset:
        yield f"the manifest says {file['bytes']} bytes, its pieces take {offset}"
    try:
        with open(directory / name, "rb") as stream:
            if stream.read(len(head)) != head:
                yield "its header is damaged"
            size = stream.seek(0, 2)
    except OSError as error:
        yield f"{error.strerror}"
        return
    if size != file["bytes"]:
        yield f"{size} bytes instead of {file['bytes']}"


def _text(box: Slices) -> str:
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in box) + "]"


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
    manifests = [files.sound_manifest(path) for path in (first, second)]
    progress = [manifest["progress"] for manifest in manifests]
    found = [
        Difference(f"progress/{key}", f"{progress[0].get(key)} and {progress[1].get(key)}")
        for key in sorted({*progress[0], *progress[1]})
        if progress[0].get(key) != progress[1].get(key)
    ]
    with Reader(first, manifests[0]) as a, Reader(second, manifests[1]) as b:
        for name in sorted({*a.tensors, *b.tensors}):
            if name not in a.tensors or name not in b.tensors:
                found.append(Difference(name, f"only in {first if name in a.tensors else second}"))
                continue
            try:
                found += _compare(name, a, b)
            except Damaged as error:
                raise InputError(str(error)) from None
    return found


def _compare(name: str, a: Reader, b: Reader) -> Iterator[Difference]:
    one, other = a.tensors[name], b.tensors[name]
    if one["shape"] != other["shape"]:
        yield Difference(name, f"shapes {one['shape']} and {other['shape']}")
        return
    same_type = one["dtype"] == other["dtype"]
    differing, absolute, magnitude = 0, 0.0, 0.0
    for slab in _slabs(one["shape"]):
        x, y = _slab(a, name, slab, one["dtype"]), _slab(b, name, slab, other["dtype"])
        unequal = _bits(x) != _bits(y) if same_type else x != y
        differing += int(unequal.sum())
        magnitude = max(magnitude, float(np.nan_to_num(np.abs(x), nan=0.0).max()))
        if unequal.any():
            delta = np.abs(x[unequal].astype(np.float64) - y[unequal])
            absolute = max(absolute, float(np.nan_to_num(delta, nan=math.inf).max()))
    if differing or not same_type:
        what = f"{differing} of {math.prod(one['shape'])} elements"
        if not same_type:
            what = f"types {one['dtype']} and {other['dtype']}, {what}"
        relative = absolute / magnitude if magnitude else (math.inf if absolute else 0.0)
        yield Difference(name, what, absolute, relative)


def _slabs(shape: Sequence[int]) -> Iterator[Slices]:
    rows = max(1, SLAB_BYTES // (8 * math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        first = slice(start, min(shape[0], start + rows))
        yield (first, *(slice(0, size) for size in shape[1:]))


def _slab(reader: Reader, name: str, slab: Slices, dtype: str) -> np.ndarray:
    values = np.zeros([part.stop - part.start for part in slab], dtype)
    reader.read(name, slab, values)
    return values


def _bits(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.itemsize}")


def as_json(difference: Difference) -> dict[str, Any]:
    """With None for what JSON has no number for."""
    values = asdict(difference)
    for key in ("greatest_absolute", "greatest_relative"):
        if values[key] is not None and not math.isfinite(values[key]):
            values[key] = None
    return values
