"""The manifest of a checkpoint: the file and the offset of each slice of each logical tensor.

    {"format_version": 2, "progress": {...}, "model": {section [model]}, other entries of the run,
     "files": {name: {"bytes"}}, "tensors": {name: {"shape", "dtype", "pieces": [{"file", "key",
     "start", "stop", "offset", "crc32"}]}}, "crc32": the checksum of all other entries}

A quantized weight is stored as two tensors, `codes/NAME` and `scales/NAME`. The entry
"quantization": {"codes", "block", ...} has the format of all quantized weights. Reading
`weights/NAME` returns the dequantized values. The entry "exponents": {name: "-3 -3 -4"} is for
matrix products in 8-bit floating point with delayed scales, which are computed from earlier steps.
The entry has, for each operand of such a product, the exponents of the operand's greatest
magnitudes in the last steps.

The checksum of the manifest detects damage to the manifest. A faulty program, or a program that is
not ptdmpi, may write a wrong manifest with a valid checksum. The checks of keys, types and lengths
detect such a manifest. The module `examine` checks that the pieces cover their tensors.
"""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from ptdmpi.base.box import Box
from ptdmpi.base.disk import read_file, write_whole
from ptdmpi.config import InputError
from ptdmpi.config.sections import WEIGHTS as KIND_OF_WEIGHTS
from ptdmpi.plan.layer.low_bit import CODES as CODE_NAMES
from ptdmpi.plan.layer.low_bit import KIND_OF_CODES, KIND_OF_SCALES, LowBit

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
# The data types that a checkpoint may contain, and their names in safetensors.
TYPE_NAMES = {"float32": "F32", "float64": "F64", "uint8": "U8"}
# Prefixes of tensor names. The name of a weight begins with WEIGHTS. A quantized weight is stored
# as two tensors, whose names begin with CODES and SCALES.
WEIGHTS, CODES, SCALES = (f"{k}/" for k in (KIND_OF_WEIGHTS, KIND_OF_CODES, KIND_OF_SCALES))
QUANTIZATION = "quantization"
EXPONENTS = "exponents"  # the manifest's key for the exponents of delayed scales.
EXTRAS = "extras"  # the manifest's key for entries that a user's program adds


@dataclass(frozen=True)
class Progress:
    """The progress of a run, apart from its tensors: `step` steps are done, and `samples` samples
    are consumed. `updates`, `loss_scale` and `good_steps` are counters of the optimizer, as in
    `Counters` (`ptdmpi.model.state`). Their defaults are the values at the start of a new run.
    `seed` determines the order of samples."""

    step: int
    samples: int
    updates: int = field(default=0, kw_only=True)
    loss_scale: float = field(default=1.0, kw_only=True)
    good_steps: int = field(default=0, kw_only=True)
    seed: int


@dataclass(frozen=True)
class StoredPiece:
    """A slice (`box`) of a tensor in a file: the slice's key in the file, the offset of its first
    byte, and the checksum of its bytes."""

    file: str
    key: str
    box: Box
    offset: int
    crc32: int


@dataclass(frozen=True)
class StoredTensor:
    """A logical tensor in a checkpoint: its full shape, its data type (the name in numpy), and its
    slices in files."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]

    def nbytes(self, piece: StoredPiece) -> int:
        """Return the size of one of the tensor's pieces in bytes."""
        return piece.box.elements * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Written:
    """A file that one rank has written: its size in bytes, and the slices of tensors in it."""

    file: str
    bytes: int
    tensors: Mapping[str, StoredTensor]


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint. `said` has, as JSON, the entries of the manifest about the run
    that wrote the checkpoint: its progress, the section [model] of its configuration, and further
    entries. `files` has the size of each file in bytes. `tensors` maps the name of each tensor in
    the training state, such as `weights/NAME`, to its description.
    """

    progress: Progress
    said: Mapping[str, Any]
    files: Mapping[str, int]
    tensors: Mapping[str, StoredTensor]

    @property
    def total_bytes(self) -> int:
        """Return the total size of all files in bytes."""
        return sum(self.files.values())

    @cached_property
    def means(self) -> dict[str, list[str]]:
        """Return the names of the tensors that are stored separately for each replica:
        `weights/NAME` -> [`weights@0/NAME`, `weights@1/NAME`, ...], in the order of the replicas.
        Reading the name without the number of a replica, `weights/NAME`, returns the average over
        all replicas."""
        replicas: dict[str, dict[int, str]] = {}
        for name in self.tensors:
            kind, _, rest = name.partition("/")
            plain, _, replica = kind.partition("@")
            if replica.isdecimal():
                replicas.setdefault(f"{plain}/{rest}", {})[int(replica)] = name
        return {
            name: [names[number] for number in sorted(names)] for name, names in replicas.items()
        }

    @property
    def replicas(self) -> int:
        """Return the number of replicas that are stored separately; 0 if replicas do not differ."""
        return max(map(len, self.means.values()), default=0)

    def as_weights(self, kind: str) -> "Manifest":
        """Return a manifest with only the tensors of the given `kind`, such as the moving average
        of the weights. These tensors are given the names of the weights, so that they are read in
        place of the weights. Raise InputError if the checkpoint has no tensors of this kind."""
        renamed = {}
        for name, tensor in self.tensors.items():
            own, slash, rest = name.partition("/")
            plain, at, replica = own.partition("@")
            if plain == kind:
                renamed[f"{KIND_OF_WEIGHTS}{at}{replica}{slash}{rest}"] = tensor
        if not renamed:
            raise InputError(f"it holds no {kind}: its run keeps none (optimizer.ema_decay = 0)")
        return replace(self, tensors=renamed)

    @property
    def exponents(self) -> dict[str, tuple[int, ...]]:
        """Return, for each operand of a matrix product with a delayed scale, the exponents of its
        greatest magnitudes in the last steps (`Counters`). Return an empty dict if the run had no
        delayed scales."""
        return {
            name: tuple(map(int, text.split()))
            for name, text in self.said.get(EXPONENTS, {}).items()
        }

    @property
    def form(self) -> LowBit | None:
        """Return the format in which weights are quantized; None if no weights are quantized."""
        said = self.said.get(QUANTIZATION)
        if said is None:
            return None
        return LowBit(said["codes"], said["block"])

    @cached_property
    def in_few_bits(self) -> dict[str, StoredTensor]:
        """Return, for each quantized weight, the description of its dequantized values: a float32
        tensor of full shape. The keys of the result are the names by which these values can be
        read. The descriptions have no pieces, because no file contains the dequantized values."""
        if self.form is None:
            return {}
        per_byte = 8 // self.form.bits
        return {
            WEIGHTS + name.removeprefix(CODES): StoredTensor(
                (codes.shape[0], codes.shape[1] * per_byte), "float32", ()
            )
            for name, codes in self.tensors.items()
            if name.startswith(CODES)
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names by which tensors can be read: stored tensors, means of replicas, and
        dequantized weights."""
        return (*self.tensors, *self.means, *self.in_few_bits)

    def find(self, name: str) -> StoredTensor | None:
        """Return the tensor with this name. If this is the name of a mean over replicas, return the
        tensor of the first replica. Return None if the checkpoint has no such tensor."""
        known = self.tensors.get(self.means.get(name, [name])[0])
        return known or self.in_few_bits.get(name)

    def __getitem__(self, name: str) -> StoredTensor:
        """Return the tensor that `find` returns for this name. Raise KeyError if `find` returns
        None."""
        stored = self.find(name)
        if stored is None:
            raise KeyError(name)
        return stored


# -- writing ---------------------------------------------------------------------------------------


def write_manifest(
    directory: Path,
    progress: Progress,
    model: Mapping[str, Any],
    *,
    written: Sequence[Written],
    lineage: Mapping[str, Any] | None = None,
) -> None:
    """Write the manifest of the files that all ranks have written, and wait until it is on the
    disk. For the arguments see `manifest_text`.

    Raise InputError if a file is not visible from this host.
    """
    for part in written:
        path = directory / part.file
        if not path.is_file() or path.stat().st_size != part.bytes:
            raise InputError(
                f"{path} was written by its rank but is not seen by rank 0: the run directory must "
                "be on a file system that all nodes share"
            )
    text = manifest_text(progress, model, written=written, lineage=lineage)
    write_whole(directory / MANIFEST, text)


def manifest_text(
    progress: Progress,
    model: Mapping[str, Any],
    *,
    written: Sequence[Written],
    lineage: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of the manifest of the files that all ranks have written. `model` is the
    section [model] of the configuration to which the weights belong. `lineage` has further entries
    about the origin of the weights.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for part in written:
        for name, tensor in part.tensors.items():
            table = {"shape": list(tensor.shape), "dtype": tensor.dtype, "pieces": []}
            tensors.setdefault(name, table)["pieces"] += map(_piece_as_json, tensor.pieces)
    manifest = {
        "format_version": FORMAT_VERSION,
        "progress": asdict(progress),
        "model": dict(model),
        **(lineage or {}),
        "files": {part.file: {"bytes": part.bytes} for part in written},
        "tensors": dict(sorted(tensors.items())),
    }
    # the checksum is computed over sorted keys, so it does not depend on the order of writing
    return json.dumps({**manifest, "crc32": checksum(manifest)}, indent=1)


def exponents_as_json(exponents: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the exponents of delayed scales (see `Counters`) as the manifest stores them: one text
    of numbers for each operand."""
    return {name: " ".join(map(str, history)) for name, history in exponents.items()}


def _piece_as_json(piece: StoredPiece) -> dict[str, Any]:
    return {
        "file": piece.file,
        "key": piece.key,
        "start": list(piece.box.start),
        "stop": list(piece.box.stop),
        "offset": piece.offset,
        "crc32": piece.crc32,
    }


def checksum(manifest: Mapping[str, Any]) -> int:
    """Return the checksum of a manifest, the value of its key `crc32`. `manifest` is the JSON
    object without that key."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


# -- reading ---------------------------------------------------------------------------------------


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raise InputError if the manifest is missing or damaged,
    or has another format version than this module. The other files of the checkpoint are not
    checked (see `sound_manifest`)."""
    path = directory / MANIFEST
    try:
        table = json.loads(read_file(path))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path} is not JSON: truncated or damaged") from None
    version = None
    if isinstance(table, dict):
        version = table.get("format_version")
    if version != FORMAT_VERSION:
        raise InputError(f"{path}: format_version {version}, this program reads {FORMAT_VERSION}")
    if table.pop("crc32", None) != checksum(table):
        raise InputError(f"{path} is damaged: its checksum does not match")
    try:
        _require_form(table)
    except ValueError as error:
        raise InputError(f"{path} is no manifest of a checkpoint: {error}") from None
    types = {tensor["dtype"] for tensor in table["tensors"].values()}
    if types - TYPE_NAMES.keys():
        raise InputError(f"{path}: types {sorted(types)}; legal: {', '.join(TYPE_NAMES)}")
    return Manifest(
        Progress(**table["progress"]),
        {name: said for name, said in table.items() if name not in ("files", "tensors")},
        {name: file["bytes"] for name, file in table["files"].items()},
        {name: _tensor_of_json(tensor) for name, tensor in table["tensors"].items()},
    )


def _tensor_of_json(table: Mapping[str, Any]) -> StoredTensor:
    pieces = (
        StoredPiece(
            file=piece["file"],
            key=piece["key"],
            box=Box(tuple(piece["start"]), tuple(piece["stop"])),
            offset=piece["offset"],
            crc32=piece["crc32"],
        )
        for piece in table["pieces"]
    )
    return StoredTensor(tuple(table["shape"]), table["dtype"], tuple(pieces))


def sound_manifest(directory: Path) -> Manifest:
    """Return the manifest of the checkpoint if all its files exist and have the recorded sizes, and
    the name of the directory has the manifest's step; otherwise raise InputError."""
    manifest = read_manifest(directory)
    named = re.fullmatch(r"step-(\d{8,})", directory.name)
    if named is not None and int(named[1]) != manifest.progress.step:
        raise InputError(f"{directory} has another name than its step, {manifest.progress.step}")
    for name, size in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise InputError(f"{path} is missing")
        if path.stat().st_size != size:
            raise InputError(f"{path} has {path.stat().st_size} bytes instead of {size}")
    return manifest


def is_sound(directory: Path) -> bool:
    """Return True if the checkpoint is complete: all files of its manifest exist and have the
    recorded sizes."""
    try:
        sound_manifest(directory)
    except InputError:
        return False
    return True


# -- structure
# -----------------------------------------------------------------------------------------

Kinds = Mapping[str, tuple[type, ...]]
_NUMBERS: Mapping[Any, tuple[type, ...]] = {int: (int,), float: (int, float)}
_PROGRESS: Kinds = {field.name: _NUMBERS[field.type] for field in fields(Progress)}
_FILE: Kinds = {"bytes": (int,)}
_TENSOR: Kinds = {"shape": (list,), "dtype": (str,), "pieces": (list,)}
_PIECE: Kinds = {
    "file": (str,),
    "key": (str,),
    "start": (list,),
    "stop": (list,),
    "offset": (int,),
    "crc32": (int,),
}


# up to 16 numbers of at most three digits, as `exponents_as_json` writes them
_EXPONENTS = re.compile(r"-?\d{1,3}( -?\d{1,3}){0,15}", re.ASCII)


def _require_form(manifest: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the key, if a key is missing or has a value of the wrong type.
    `progress` must have exactly the fields of `Progress`."""
    for name in ("progress", "model", "files", "tensors"):
        _require(manifest, name, (dict,), "it")
    _require_all(manifest["progress"], _PROGRESS, "progress")
    if manifest["progress"].keys() != _PROGRESS.keys():
        raise ValueError(f"progress must have the fields {', '.join(_PROGRESS)}")
    for name, file in manifest["files"].items():
        _require_all(file, _FILE, f"file {name!r}")
        if PurePath(name).name != name:
            raise ValueError(f"file {name!r} is not a plain name")
    for name, tensor in manifest["tensors"].items():
        _require_tensor(f"tensor {name!r}", tensor, manifest["files"])
    exponents = manifest.get(EXPONENTS, {})
    if type(exponents) is not dict:
        raise ValueError(f"{EXPONENTS} is not an object")
    for name, text in exponents.items():
        if type(text) is not str or not _EXPONENTS.fullmatch(text):
            raise ValueError(f"{EXPONENTS} of {name!r} are not whole numbers")
    if QUANTIZATION in manifest:
        _require_quantization(manifest[QUANTIZATION], manifest["tensors"])


def _require_quantization(said: Any, tensors: Mapping[str, Any]) -> None:
    _require_all(said, {"codes": (str,), "block": (int,)}, QUANTIZATION)
    if said["codes"] not in CODE_NAMES or said["block"] < 1:
        raise ValueError(f"{QUANTIZATION} is {said['codes']!r} in blocks of {said['block']}")
    form = LowBit(said["codes"], said["block"])
    for name, codes in tensors.items():
        if not name.startswith(CODES):
            continue
        scales = tensors.get(SCALES + name.removeprefix(CODES))
        if scales is None or (codes["dtype"], scales["dtype"]) != ("uint8", "float32"):
            raise ValueError(f"{name!r} has no scales, or another type than codes and scales have")
        rows, *more = codes["shape"]
        columns = 0
        if len(more) == 1:
            columns = more[0] * 8 // form.bits
        known = list(form.scale_shape(rows, columns))
        if not columns or columns % form.block or scales["shape"] != known:
            raise ValueError(f"{name!r} and its scales do not have the shapes of one matrix")


def _require_tensor(where: str, tensor: Any, files: Mapping[str, Any]) -> None:
    _require_all(tensor, _TENSOR, where)
    shape = tensor["shape"]
    if not shape or not _are_counts(shape) or 0 in shape:
        raise ValueError(f"{where} has shape {shape}")
    for piece in tensor["pieces"]:
        _require_all(piece, _PIECE, f"a piece of {where}")
        start, stop = piece["start"], piece["stop"]
        if not len(start) == len(stop) == len(shape) or not _are_counts([*start, *stop]):
            raise ValueError(f"a piece of {where} runs from {start} to {stop} of shape {shape}")
        if any(first >= last for first, last in zip(start, stop, strict=True)):
            raise ValueError(f"a piece of {where} from {start} to {stop} is empty")
        if piece["file"] not in files:
            raise ValueError(f"a piece of {where} is in {piece['file']!r}, which is not listed")
        if piece["offset"] < 0:
            raise ValueError(f"a piece of {where} begins at byte {piece['offset']}")


def _are_counts(values: list[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _require_all(table: Any, kinds: Kinds, where: str) -> None:
    if type(table) is not dict:
        raise ValueError(f"{where} is not an object")
    for name, kind in kinds.items():
        _require(table, name, kind, where)


def _require(table: Mapping[str, Any], name: str, kinds: tuple[type, ...], where: str) -> None:
    if type(table.get(name)) not in kinds:
        if name in table:
            raise ValueError(f"{where} has a wrong {name!r}")
        raise ValueError(f"{where} has no {name!r}")
