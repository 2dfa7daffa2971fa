"""Reading and writing the weight files of a Hugging Face model, one slice of a tensor at a time.

A model has either `model.safetensors`, or several files and `model.safetensors.index.json`. Pickles
are not read.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ptdmpi.base.box import Box, rows_of
from ptdmpi.base.disk import open_file, read_file
from ptdmpi.base.progress import progress
from ptdmpi.config import InputError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# The number of bytes of a tensor that are read into memory at a time.
SLAB_BYTES = 1 << 26
# The maximum size in bytes of a file if a model has several files, as in `transformers`.
FILE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its data type (safetensors' name of the type), its shape, and its size in
    bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class WeightFiles:
    """All tensors of a model directory. `WeightFiles` is a context manager, because it keeps files
    open.

    `headers` has the text of each file's header, from which an identical file can be written.
    """

    def __init__(self, directory: Path) -> None:
        """Read the headers of the weight files in `directory`. Raise InputError for files that are
        missing or damaged, or that are pickles."""
        self.directory = directory
        self.headers: dict[str, str] = {}
        self.tensors: dict[str, Stored] = {}
        self._files: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()
        index = self._index()
        for file in dict.fromkeys(index.values()) if index else (SINGLE,):
            self.headers[file] = header_text(directory / file)
            for name, stored in entries(self.headers[file]):
                if index and index.get(name) != file:
                    raise InputError(
                        f"{directory / file} has {name}, but {INDEX} does not list it there"
                    )
                self.tensors[name] = stored
                self._files[name] = file
        missing = sorted(index.keys() - self.tensors.keys())
        if missing:
            raise InputError(
                f"{directory / index[missing[0]]} does not contain {missing[0]}, though {INDEX} "
                "lists it there"
            )

    def _index(self) -> dict[str, str]:
        """Return a table that maps each tensor's name to the name of its file. The table is empty
        if the model has a single file."""
        path = self.directory / INDEX
        if (self.directory / SINGLE).is_file():
            return {}
        if not path.is_file():
            message = f"{self.directory} has neither {SINGLE} nor {INDEX}"
            if pickle := next((f for kind in PICKLES for f in self.directory.glob(kind)), None):
                message += f"; {pickle.name} is a pickle, which can run code"
            raise InputError(
                f"{message}; save the model by save_pretrained with safe serialization"
            )
        table = read_json(path).get("weight_map")
        texts = isinstance(table, dict) and all(isinstance(f, str) for f in table.values())
        if not texts or not table or any(Path(file).name != file for file in table.values()):
            raise InputError(f"{path}: weight_map must name a file of this directory per tensor")
        return table

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _file(self, name: str) -> Any:
        """Return the open file that contains a tensor."""
        file = self._files[name]
        if file not in self._open:
            path = self.directory / file
            try:
                self._open[file] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise InputError(f"{path}: {error}") from None
        return self._open[file]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Return the tensor `name`, or its slice `box`, in the data type that it has in the
        file."""
        if box is None:
            return self._file(name).get_tensor(name)
        return self._file(name).get_slice(name)[box.index]


def header_text(path: Path) -> str:
    """Return the unchanged header of a safetensors file. Raise InputError if the file is damaged or
    truncated."""
    try:
        with open_file(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            if not 2 <= length <= size - 8:
                raise InputError(f"{path} is not a safetensors file, or is truncated")
            text = file.read(length).decode()
        with safe_open(path, framework="pt"):
            # when the library opens the file, it checks the offsets, the types and the size of the
            # file
            return text
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, SafetensorError) as error:
        raise InputError(f"{path} is damaged or truncated: {error}") from None


def entries(header: str) -> Iterator[tuple[str, Stored]]:
    """Yield the name of each tensor in a header, and its data type, shape and size (`Stored`), in
    the order of the tensors' bytes."""
    table = json.loads(header)
    table.pop("__metadata__", None)
    for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        yield name, Stored(entry["dtype"], tuple(entry["shape"]), end - start)


def make_header(tensors: Iterable[tuple[str, Stored]]) -> str:
    """Return the header of a new file with these tensors in this order."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, stored in tensors:
        end = start + stored.nbytes
        table[name] = {
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(table, separators=(",", ":"))
    return text + " " * (-len(text.encode()) % 8)


def new_headers(tensors: Mapping[str, Stored]) -> dict[str, str]:
    """Return the headers of new files with these tensors, by file name. A file has at most
    FILE_BYTES bytes, or contains a single tensor."""
    groups: list[list[tuple[str, Stored]]] = [[]]
    filled = 0
    for name, stored in tensors.items():
        if groups[-1] and filled + stored.nbytes > FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append((name, stored))
        filled += stored.nbytes
    if len(groups) == 1:
        return {SINGLE: make_header(groups[0])}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": make_header(group)
        for number, group in enumerate(groups, 1)
    }


def index_json(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of model.safetensors.index.json for a model with several files."""
    total = 0
    files: dict[str, str] = {}
    for file, header in headers.items():
        for name, stored in entries(header):
            total += stored.nbytes
            files[name] = file
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}


def write_file(path: Path, header: str, values: Callable[[str, Stored], Iterator[Tensor]]) -> None:
    """Write and sync one file. For each tensor, `values` yields the elements in order, as a
    sequence of smaller tensors of any size."""
    text = header.encode()
    size_bytes = sum(stored.nbytes for _, stored in entries(header))
    with open(path, "xb") as file, progress("converting", size_bytes, "B") as advance:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, stored in entries(header):
            left = stored.nbytes
            for piece in values(name, stored):
                data = piece.contiguous().reshape(-1).view(torch.uint8).numpy()
                file.write(data.data)
                left -= data.size
                advance(data.size)
            if left:
                raise AssertionError(f"{name}: {left} bytes are missing")
        file.flush()
        os.fsync(file.fileno())


def slabs(shape: Sequence[int], element_bytes: int) -> Iterator[Box]:
    """Yield slices of a tensor that consist of complete rows. Each slice has about SLAB_BYTES
    bytes, but at least one row."""
    return Box.whole(shape).slabs(rows_of(shape, element_bytes, SLAB_BYTES))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise InputError if the file cannot be read, or does not
    contain an object."""
    try:
        values = json.loads(read_file(path))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} is not a JSON object")
    return values
