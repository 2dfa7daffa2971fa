"""Whether a manifest has all that its readers take for granted: keys, kinds, lengths.

Its checksum tells damage; this tells what another program, or a faulty one, wrote with a checksum
that holds. Whether the pieces cover their tensors is the matter of `examine`.
"""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

_FILE = {"bytes": (int,)}
_TENSOR = {"shape": (list,), "dtype": (str,), "pieces": (list,)}
_PIECE = {
    "file": (str,),
    "key": (str,),
    "start": (list,),
    "stop": (list,),
    "offset": (int,),
    "crc32": (int,),
}
Kinds = Mapping[str, tuple[type, ...]]


def require_form(manifest: Mapping[str, Any], progress: Kinds) -> None:
    """Raises ValueError that says what is missing or of another kind; `progress` has exactly the
    fields of that name."""
    for name in ("progress", "model", "files", "tensors"):
        _require(manifest, name, (dict,), "it")
    _require_all(manifest["progress"], progress, "progress")
    if manifest["progress"].keys() != progress.keys():
        raise ValueError(f"progress has other fields than {', '.join(progress)}")
    for name, file in manifest["files"].items():
        _require_all(file, _FILE, f"file {name!r}")
        if PurePath(name).name != name:
            raise ValueError(f"file {name!r} is no plain name")
    for name, tensor in manifest["tensors"].items():
        _require_tensor(f"tensor {name!r}", tensor, manifest["files"])


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
        raise ValueError(f"{where} is no object")
    for name, kind in kinds.items():
        _require(table, name, kind, where)


def _require(table: Mapping[str, Any], name: str, kinds: tuple[type, ...], where: str) -> None:
    if type(table.get(name)) not in kinds:
        found = f"a wrong {name!r}" if name in table else f"no {name!r}"
        raise ValueError(f"{where} has {found}")
