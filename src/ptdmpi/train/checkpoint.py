"""Checkpoints of logical tensors: any layout reads what any layout wrote.

A checkpoint is a directory `step-00000100/` with one safetensors file per rank that had something
to write, and `manifest.json`, which says for every logical tensor (`weights/NAME`, `exp_avg/NAME`,
`exp_avg_sq/NAME`; float32 masters) its shape, its type, and in which file which box of it stands.
Everything is written and synced under a temporary name; the manifest comes last, then the directory
is renamed, then `latest` is moved. Ranks that hold equal tensors share the writing.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ptdmpi.comm.world import Axes
from ptdmpi.config import InputError
from ptdmpi.model.parameters import Entry
from ptdmpi.train.engine import Engine

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands, besides its tensors. `step` steps are done, `samples` consumed."""

    step: int
    samples: int
    updates: int
    loss_scale: float
    good_steps: int
    seed: int


class Checkpoints:
    """The checkpoints of one run directory; every rank calls every method."""

    def __init__(self, directory: Path, engine: Engine, keep: int) -> None:
        self.directory = directory
        self.engine = engine
        self.axes: Axes = engine.axes
        self.keep = keep

    # -- saving ----------------------------------------------------------------------------------

    def save(self, step: int) -> Path:
        """Write the state after `step` steps; returns the directory.

        Raises InputError on every rank if one of them cannot write; nothing of the checkpoint is
        left then, and the ones before it stay.
        """
        world, engine = self.axes.world, self.engine
        final = self.directory / f"step-{step:08d}"
        temporary = self.directory / f"step-{step:08d}.tmp"
        self._on_root(lambda: _fresh(temporary))
        pieces, error = None, None
        try:
            pieces = self._write_mine(temporary)
        except (OSError, SafetensorError) as failure:
            error = f"rank {world.rank}: {failure}"
        errors = [text for text in world.all_gather_object(error) if text]
        if errors:
            self._on_root(lambda: shutil.rmtree(temporary, ignore_errors=True))
            raise InputError(f"checkpoint {final} was not written: {errors[0]}")
        progress = Progress(
            step=step,
            samples=step * engine.config.batch.global_size,
            updates=engine.optimizer.updates,
            loss_scale=engine.loss_scale.value,
            good_steps=engine.loss_scale.good_steps,
            seed=engine.config.run.seed,
        )
        everyone = world.all_gather_object(pieces)
        self._on_root(lambda: self._publish(temporary, final, everyone, progress))
        return final

    def _on_root(self, work: Callable[[], Any]) -> None:
        """Rank 0 does it; a failure is every rank's."""
        error = None
        if self.axes.world.rank == 0:
            try:
                work()
            except OSError as failure:
                error = str(failure)
        error = self.axes.world.broadcast_object(error)
        if error:
            raise InputError(f"checkpoint in {self.directory}: {error}")

    def _write_mine(self, directory: Path) -> dict[str, Any] | None:
        """This rank's share in its own file; returns what the manifest must know of it."""
        tensors: dict[str, Tensor] = {}
        pieces: list[dict[str, Any]] = []
        for entry in self._written_here():
            for kind, view in self._tensors(entry):
                for box in entry.declaration.boxes(self.axes.tensor.rank, self.axes.tensor.size):
                    key = f"{kind}/{entry.name}#{len(pieces)}"
                    tensors[key] = view[box.local].contiguous().cpu()
                    pieces.append(
                        {
                            "tensor": f"{kind}/{entry.name}",
                            "key": key,
                            "shape": list(entry.declaration.shape),
                            "start": [part.start for part in box.logical],
                            "stop": [part.stop for part in box.logical],
                        }
                    )
        if not tensors:
            return None
        path = directory / f"rank-{self.axes.world.rank:05d}.safetensors"
        save_file(tensors, path)
        _sync(path)
        return {"file": path.name, **_fingerprint(path), "pieces": pieces}

    def _written_here(self) -> Iterator[Entry]:
        """Each tensor once over the ranks that hold it, in turn."""
        axes = self.axes
        counted = set(self.engine.reduction.counted)
        for number, entry in enumerate(self.engine.buffer.entries.values()):
            holders, place = axes.data.size, axes.data.rank
            if entry.declaration.split is None:
                holders, place = (
                    holders * axes.tensor.size,
                    place * axes.tensor.size + axes.tensor.rank,
                )
            if entry.name in counted and number % holders == place:
                yield entry

    def _tensors(self, entry: Entry) -> Iterator[tuple[str, Tensor]]:
        yield "weights", entry.view(self.engine.buffer.master)
        for kind in ("exp_avg", "exp_avg_sq"):
            yield kind, self.engine.optimizer.moment(kind, entry)

    def _publish(
        self, temporary: Path, final: Path, written: list[dict | None], progress: Progress
    ) -> None:
        tensors: dict[str, dict[str, Any]] = {}
        files = {}
        dtype = str(self.engine.buffer.master.dtype).removeprefix("torch.")
        for rank_files in written:
            if rank_files is None:
                continue
            name = rank_files["file"]
            files[name] = {key: rank_files[key] for key in ("bytes", "crc32")}
            for piece in rank_files["pieces"]:
                tensor = tensors.setdefault(
                    piece["tensor"], {"shape": piece["shape"], "dtype": dtype, "pieces": []}
                )
                place = {key: piece[key] for key in ("key", "start", "stop")}
                tensor["pieces"].append({"file": name, **place})
        manifest = {
            "format_version": FORMAT_VERSION,
            "progress": asdict(progress),
            "files": files,
            "tensors": dict(sorted(tensors.items())),
        }
        _write_synced(temporary / MANIFEST, json.dumps(manifest, indent=1))
        _sync(temporary)
        if final.exists():  # the same step again, after going back to an earlier checkpoint
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(self.directory)
        _write_synced(self.directory / "latest.tmp", final.name + "\n")
        (self.directory / "latest.tmp").rename(self.directory / "latest")
        _sync(self.directory)
        if self.keep:
            for old in sorted(self.directory.glob("step-????????"))[: -self.keep]:
                shutil.rmtree(old)

    # -- loading ---------------------------------------------------------------------------------

    def resume(self, wanted: str) -> tuple[Progress | None, list[str]]:
        """Load what `checkpoint.resume` asks for: "auto" the newest complete one if there is one,
        "never" nothing, else the checkpoint of that path. Returns also what was stepped over.

        Raises InputError if a named checkpoint cannot be used, or does not fit the model.
        """
        if wanted == "never":
            return None, []
        skipped: list[str] = []
        candidates = [Path(wanted)]
        if wanted == "auto":
            candidates = sorted(self.directory.glob("step-????????"), reverse=True)
        for candidate in candidates:
            problem = self._problem(candidate)
            if problem is None:
                return self._load(candidate), skipped
            skipped.append(f"{candidate}: {problem}")
        if wanted != "auto":
            raise InputError(f"checkpoint.resume = {skipped[0]}")
        return None, skipped

    def _problem(self, directory: Path) -> str | None:
        """Why the checkpoint cannot be read, the same on all ranks; each checks its share."""
        world = self.axes.world
        problem, files = None, {}
        if world.rank == 0:
            try:
                files = read_manifest(directory)["files"]
            except InputError as error:
                problem = str(error)
        problem, files = world.broadcast_object((problem, files))
        if problem:
            return problem
        mine = sorted(files)[world.rank :: world.size]
        bad = next((name for name in mine if not _intact(directory / name, files[name])), None)
        bad = next((name for name in world.all_gather_object(bad) if name), None)
        return f"{bad} is missing or damaged" if bad else None

    def _load(self, directory: Path) -> Progress:
        engine, axes = self.engine, self.axes
        manifest = axes.world.broadcast_object(
            read_manifest(directory) if axes.world.rank == 0 else None
        )
        reader = Reader(directory, manifest)
        for entry in engine.buffer.entries.values():
            for kind, local in self._tensors(entry):
                for box in entry.declaration.boxes(axes.tensor.rank, axes.tensor.size):
                    reader.read(
                        f"{kind}/{entry.name}",
                        entry.declaration.shape,
                        box.logical,
                        local[box.local],
                    )
        engine.buffer.refresh_weights()
        progress = Progress(**manifest["progress"])
        engine.optimizer.updates = progress.updates
        if engine.loss_scale.dynamic:
            engine.loss_scale.value = progress.loss_scale
            engine.loss_scale.good_steps = progress.good_steps
        return progress


class Reader:
    """Reads boxes of logical tensors, whatever boxes they were written in."""

    def __init__(self, directory: Path, manifest: dict[str, Any]) -> None:
        self.directory = directory
        self.tensors = manifest["tensors"]

    def read(
        self, name: str, shape: tuple[int, ...], wanted: tuple[slice, ...], target: Tensor
    ) -> None:
        """Fill `target` with the box `wanted` of tensor `name`; reads only the bytes it needs.

        Raises InputError if the checkpoint has no such tensor of this shape.
        """
        stored = self.tensors.get(name)
        if stored is None or tuple(stored["shape"]) != shape:
            found = "is missing" if stored is None else f"has shape {stored['shape']}"
            raise InputError(
                f"checkpoint {self.directory}: {name} {found}, this model needs {list(shape)}"
            )
        for piece in stored["pieces"]:
            box = [slice(*ends) for ends in zip(piece["start"], piece["stop"], strict=True)]
            common = [
                slice(max(a.start, b.start), min(a.stop, b.stop))
                for a, b in zip(box, wanted, strict=True)
            ]
            if all(part.start < part.stop for part in common):
                with safe_open(self.directory / piece["file"], framework="pt") as file:
                    values = file.get_slice(piece["key"])[_relative(common, box)]
                target[_relative(common, wanted)] = values.to(target)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises InputError if there is none that this version reads."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except OSError as error:
        raise InputError(f"{directory / MANIFEST}: {error.strerror}") from None
    except ValueError:
        raise InputError(f"{directory / MANIFEST} is not JSON") from None
    if manifest.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"{directory}: format_version {manifest.get('format_version')}, "
            f"this program reads {FORMAT_VERSION}"
        )
    return manifest


def _relative(part: list[slice], origin) -> tuple[slice, ...]:
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, origin, strict=True)
    )


def _fresh(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _fingerprint(path: Path) -> dict[str, int]:
    crc, size = 0, 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return {"bytes": size, "crc32": crc}


def _intact(path: Path, expected: dict[str, int]) -> bool:
    return path.is_file() and _fingerprint(path) == expected


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_synced(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)
