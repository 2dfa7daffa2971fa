"""The log-probabilities that a reference model assigns to the labels in shards of pairs of answers.

The folder REFERENCE of a dataset has one array per shard, float32 [tokens], in numpy's format.
Element i is the log-probability of token i, given the earlier tokens of its document. The element
is 0 for tokens that do not count as labels. The file SUMMARY in this folder names the model and the
shards, with checksums, and is written after the arrays.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ptdmpi.base.disk import open_file, read_file, replacing, write_whole
from ptdmpi.config import InputError
from ptdmpi.data.batches import MicrobatchRows
from ptdmpi.data.documents import Locate
from ptdmpi.data.header import ShardHeader, format_checksum
from ptdmpi.data.shards import Dataset

# The name of the folder with the log-probabilities, in the folder of a dataset.
REFERENCE = "reference"
SUMMARY = "reference.json"
_OPEN_SHARDS = 512  # maximum number of shards whose log-probabilities are mapped at a time
MADE_BY = "make them with ptdmpi-data score MODEL DATA"


class References:
    """The stored log-probabilities of one dataset."""

    def __init__(self, dataset: Dataset) -> None:
        """Read the summary of the log-probabilities. Raise InputError if there is no summary, or if
        it was made from other shards."""
        self.folder = dataset.directory / REFERENCE
        self._headers = dataset.headers
        summary = _read_summary(self.folder / SUMMARY)
        self.model = str(summary["model"])
        self._checksums: list[str] = []
        for header in dataset.headers:
            known = summary["shards"].get(header.path.name)
            if known is None or known.get("shard") != _identity(header):
                raise InputError(
                    f"{self.folder}: has no log-probabilities of the present "
                    f"{header.path.name}; {MADE_BY}"
                )
            self._checksums.append(str(known["checksum"]))

    @property
    def sha256(self) -> str:
        """Return a hash of the checksums of all log-probabilities, so that the arrays need not be
        read."""
        return hashlib.sha256(json.dumps(self._checksums).encode()).hexdigest()

    def shard(self, number: int) -> np.ndarray:
        """Return the log-probabilities of one shard's tokens, float32 [tokens], mapped into memory.
        Raise InputError if the file is damaged or cannot be read."""
        path = self.folder / f"{self._headers[number].path.stem}.npy"
        try:
            with open_file(path, "rb"):  # refuses a pipe
                values: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read: {error}; {MADE_BY}") from None
        if values.dtype != np.float32 or values.shape != (self._headers[number].tokens,):
            raise InputError(f"{path}: has {values.dtype} {list(values.shape)}; {MADE_BY}")
        if format_checksum(zlib.crc32(values.data)) != self._checksums[number]:
            raise InputError(f"{path}: is damaged: it has another checksum; {MADE_BY}")
        return values


class ReferencedSamples:
    """A dataset of pairs together with its reference log-probabilities. `sha256` covers the
    log-probabilities, so a run treats changed log-probabilities as changed data."""

    def __init__(self, dataset: Dataset, references: References) -> None:
        self._dataset = dataset
        self.tokenizer = dataset.tokenizer
        self.tokenizer_sha256 = dataset.tokenizer_sha256
        both = dataset.sha256 + references.sha256
        self.sha256 = hashlib.sha256(both.encode()).hexdigest()

    def samples(self, length: int) -> int:
        """Return the number of samples of `length` tokens."""
        return self._dataset.samples(length)


class LabelReferences:
    """The log-probabilities of the labels of samples, from the shards of several datasets."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        references: Sequence[References],
        locate: Locate,
        length: int,
    ) -> None:
        self._datasets = datasets
        self._locate = locate
        self._length = length
        self._shard = lru_cache(_OPEN_SHARDS)(partial(_shard, tuple(references)))

    def of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the log-probability of each label, float32 [n, length], for the samples
        `sample_ids` (int [n])."""
        values = np.empty((len(sample_ids), self._length), dtype=np.float32)
        places = zip(*(column.tolist() for column in self._locate(sample_ids)), strict=True)
        for row, (number, sample) in enumerate(places):
            (shard,), (start,) = self._datasets[number].places(np.array([sample]), self._length)
            stored = self._shard(number, int(shard))
            values[row] = stored[start + 1 : start + 1 + self._length]
        return values


def with_references(references: LabelReferences, microbatch: MicrobatchRows) -> MicrobatchRows:
    """Return a copy of the microbatch with the log-probabilities of its labels (`references`)."""
    return microbatch._replace(references=references.of(microbatch.samples))


def _shard(references: Sequence[References], dataset: int, shard: int) -> np.ndarray:
    return references[dataset].shard(shard)


def write_shard(header: ShardHeader, values: np.ndarray) -> dict[str, Any]:
    """Write the log-probabilities of one shard, float32 [tokens], and return its entry in the
    summary. Raise InputError if the file cannot be written."""
    folder = header.path.parent / REFERENCE
    path = folder / f"{header.path.stem}.npy"
    try:
        folder.mkdir(exist_ok=True)
        # remove an earlier summary, because its checksums do not match the new log-probabilities
        (folder / SUMMARY).unlink(missing_ok=True)
        with replacing(path) as temporary, open(temporary, "wb") as file:
            np.save(file, values, allow_pickle=False)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    return {"shard": _identity(header), "checksum": format_checksum(zlib.crc32(values.data))}


def write_summary(directory: Path, model: str, shards: Mapping[str, Any]) -> None:
    """Write the summary, after the log-probabilities of all shards. `shards` has the entry of each
    shard by its name. Raise InputError if the summary cannot be written."""
    path = directory / REFERENCE / SUMMARY
    try:
        write_whole(path, json.dumps({"model": model, "shards": shards}, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def _identity(header: ShardHeader) -> list[str]:
    """Return the checksums of a shard's tokens and weights. These checksums show whether stored
    log-probabilities belong to this shard."""
    return [header.checksum, header.weights_checksum]


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(read_file(path))
    except FileNotFoundError:
        raise InputError(
            f"{path.parent.parent}: has no log-probabilities of a reference model; {MADE_BY}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}; {MADE_BY}") from None
    known = isinstance(summary, dict) and isinstance(summary.get("shards"), dict)
    if not known or not all(isinstance(entry, dict) for entry in summary["shards"].values()):
        raise InputError(f"{path}: is no list of log-probabilities; {MADE_BY}")
    return {"model": "", **summary}
