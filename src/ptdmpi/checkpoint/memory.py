"""Copies of the training state in the memory of the nodes. When ranks are lost, the run continues
from such a copy.

A copy is a checkpoint whose files are in a folder of the file system tmpfs, which is in memory. The
files in this folder remain if the ranks die. Each node has the files of its own ranks and the files
of the previous node's ranks (Wang et al. 2023, "Gemini", section 4), so that no file is lost if one
node is lost. `ptdmpi run` chooses the folder and removes it at the end.

    FOLDER/step-00000012-ID/rank-00000.safetensors ... manifest.json

A copy is made in two phases. First every rank writes its file, and sends the file to the next node.
When all ranks have reported success, each node writes the manifest, which makes the copy valid.
When all nodes have reported success, the previous copy is removed. After the first copy there is
therefore a complete copy at any time.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ptdmpi.base.disk import write_whole
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.boxes import write
from ptdmpi.checkpoint.load import Judge, load
from ptdmpi.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    Written,
    read_manifest,
)
from ptdmpi.checkpoint.outgoing import OutgoingState
from ptdmpi.comm.communicator import Handle
from ptdmpi.comm.mpi import MpiCommunicator
from ptdmpi.comm.world import Axes, World
from ptdmpi.config import InputError
from ptdmpi.model.state import State, key

# The largest size of a message in bytes. MPI calls count elements in 32-bit integers, so larger
# files are sent in several messages.
MESSAGE_BYTES = 1 << 30
Describe = Callable[[int, Sequence[Written]], str]


@dataclass(frozen=True)
class HeldCopy:
    """The files of one copy that a node has: the text of the copy's manifest, and the size of each
    file in bytes. The text is empty until the copy is valid.
    """

    manifest: str
    sizes: Mapping[str, int]


class MemoryCopies:
    """The copies of one run's state in the memory of the nodes. Every rank calls every method.

    `count` is the number of copies that this process has made, without failed attempts. `seconds`
    is the total time of these copies.
    """

    def __init__(
        self, folder: Path, world: World, state: State, axes: Axes, *, describe: Describe
    ) -> None:
        """Prepare to make copies in `folder`. The function `describe(step, files)`, which only rank
        0 calls, returns the text of a copy's manifest. Its argument `files` has the files that all
        ranks have written."""
        self.folder = folder
        self.state = state
        self.describe = describe
        self.world = axes.world
        self.wire = MpiCommunicator(world.control)
        self.outgoing = OutgoingState(state, axes, mean=False, copied=False)
        here = (world.process.node, str(folder))
        places = self.world.all_gather_object(here)
        # the ranks of each node; in tests each folder of a machine is treated as a node
        self.nodes = [
            [rank for rank, other in enumerate(places) if other == place]
            for place in sorted(set(places))
        ]
        self.node = next(ranks for ranks in self.nodes if self.world.rank in ranks)
        self.newest: Path | None = None
        # `find` sets these two attributes. `_holdings` has an entry for each rank: the copies on
        # its node if the rank leads the node, otherwise {}. `_found` is the name of the newest
        # complete copy.
        self._holdings: list[dict[str, HeldCopy]] = []
        self._found = ""
        self.seconds = 0.0
        self.count = 0

    @property
    def leads(self) -> bool:
        """Return True on the rank that manages the folder of its node."""
        return self.world.rank == self.node[0]

    # -- making a copy -----------------------------------------------------------------------------

    def keep(self, step: int) -> str:
        """Copy the state after `step`. Return "", or the reason why the copy failed; all ranks
        return the same text. If the copy fails, the previous copy stays."""
        begin = time.perf_counter()
        name = self.world.broadcast_object(f"{files.name_of(step)}-{time.time_ns():x}")
        path = self.folder / name
        written, why = self._written(path)
        everyone = self.world.all_gather_object((written, why))
        parts = [part for part, _ in everyone if part is not None]
        why = _first(reason for _, reason in everyone)
        if not why:
            why = _first(self.world.all_gather_object(self._passed_on(path, everyone)))
        if not why:
            text = self.describe(step, parts) if self.world.rank == 0 else ""
            why = self._commit(path, self.world.broadcast_object(text))
        if not why:
            self.newest = path
            self.count += 1
            self.seconds += time.perf_counter() - begin
        if self.leads:
            self._remove_all_but(self.newest)
        return why

    def _written(self, path: Path) -> tuple[Written | None, str]:
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = path / f"rank-{self.world.rank:05d}.safetensors"
            return write(file, self.outgoing.take()), ""
        except OSError as error:
            return None, f"rank {self.world.rank}: {error}"

    def _passed_on(self, path: Path, everyone: Sequence[tuple[Written | None, str]]) -> str:
        """Send this rank's file to the next node, and write the files that the previous node sends.
        Return "", or the reason why a file could not be written. `everyone` has the results of
        `_written` on all ranks.

        The files of the previous node's ranks are divided among the ranks of this node.
        """
        if len(self.nodes) == 1:
            return ""
        number = self.nodes.index(self.node)
        after = self.nodes[(number + 1) % len(self.nodes)]
        before = self.nodes[number - 1]
        own = everyone[self.world.rank][0]
        assert own is not None
        target = after[self.node.index(self.world.rank) % len(after)]
        sending = self._send(path / own.file, target)
        why = ""
        for place, source in enumerate(before):
            part = everyone[source][0]
            if part is not None and self.node[place % len(self.node)] == self.world.rank:
                why = why or self._receive(path / part.file, part.bytes, source)
        for handle in sending:
            handle.wait()
        return why

    def _commit(self, path: Path, manifest: str) -> str:
        """Write the manifest on each node, which makes the copy valid. Return "", or the reason why
        a node could not write the manifest."""
        why = ""
        if self.leads:
            try:
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_whole(path / MANIFEST, manifest)
            except OSError as error:
                why = f"rank {self.world.rank}: {error}"
        return _first(self.world.all_gather_object(why))

    # -- continuing from a copy
    # -------------------------------------------------------------------------

    def find(self) -> int | None:
        """Search for the newest complete copy. A copy is complete if each of its files is on some
        node. Return the step of this copy, or None if there is no complete copy."""
        self._holdings = self.world.all_gather_object(self._held() if self.leads else {})
        names = {name for held in self._holdings for name in held}
        whole = [name for name in names if self._is_whole(name)]
        self._found = max(whole, key=_place_in_time, default="")
        return _place_in_time(self._found)[0] if whole else None

    def load(self, judge: Judge) -> Manifest | str:
        """Load the copy that the last call of `find` has found. If a node lacks files that its
        ranks need, another node sends these files. Return the manifest, or the reason why the copy
        cannot be read."""
        path = self.folder / self._found
        why = self._commit(path, self._text(self._found)) or self._fetch(path)
        if why:
            return why
        manifest = load(self.state, self.world, path, judge=judge, whole=False)
        self.newest = path
        if self.leads:
            self._remove_all_but(path)
        return manifest

    def _is_whole(self, name: str) -> bool:
        text = self._text(name)
        return bool(text) and all(
            self._holder(name, file, about["bytes"]) is not None
            for file, about in json.loads(text)["files"].items()
        )

    def _text(self, name: str) -> str:
        """Return the text of the manifest of the copy `name`, from the first node that has this
        manifest; "" if no node has it."""
        return _first(held[name].manifest for held in self._holdings if name in held)

    def _holder(self, name: str, file: str, size: int) -> int | None:
        """Return the rank that leads the first node with the complete `file` (`size` bytes) of the
        copy `name`. Return None if no node has the complete file."""
        for rank, held in enumerate(self._holdings):
            if name in held and held[name].sizes.get(file) == size:
                return rank
        return None

    def _fetch(self, path: Path) -> str:
        """Send to each node the files that its ranks will read and that the node lacks. If several
        nodes have a file, the first of them sends it. Only the ranks that lead a node send and
        receive, and all of them use the same order of messages. Return "", or the reason why a file
        could not be sent."""
        manifest = read_manifest(path)
        needs = self.world.all_gather_object(self._needed(manifest))
        why = ""
        for ranks in self.nodes:
            target = ranks[0]
            held = self._holdings[target].get(path.name, HeldCopy("", {}))
            for file in sorted(set().union(*(needs[rank] for rank in ranks))):
                size = manifest.files[file]
                source = self._holder(path.name, file, size)
                if held.sizes.get(file) == size or source is None:
                    continue
                if self.world.rank == source:
                    for handle in self._send(path / file, target):
                        handle.wait()
                elif self.world.rank == target:
                    why = self._receive(path / file, size, source) or why
        return _first(self.world.all_gather_object(why))

    def _needed(self, manifest: Manifest) -> set[str]:
        """Return the names of the files that contain slices of this rank's state."""
        needed = set()
        for piece in self.state.pieces():
            names = [piece.key, key(piece.kind, piece.name)]
            names += manifest.means.get(names[1], [])
            for stored in (manifest.tensors[name] for name in names if name in manifest.tensors):
                needed |= {part.file for part in stored.pieces if part.box.overlap(piece.box)}
        return needed

    def _held(self) -> dict[str, HeldCopy]:
        """Return the copies in this node's folder, by name. A damaged manifest counts as
        missing."""
        held: dict[str, HeldCopy] = {}
        with contextlib.suppress(OSError):
            for path in self.folder.glob("step-*-*"):
                sizes = {file.name: file.stat().st_size for file in path.glob("rank-*")}
                text = ""
                with contextlib.suppress(InputError):
                    read_manifest(path)  # raises InputError unless its checksum is right
                    text = (path / MANIFEST).read_text(encoding="utf-8")
                held[path.name] = HeldCopy(text, sizes)
        return held

    # -- files and messages ------------------------------------------------------------------------

    def _send(self, path: Path, target: int) -> list[Handle]:
        data = torch.from_numpy(np.fromfile(path, np.uint8))
        return [self.wire.isend(part, target) for part in data.split(MESSAGE_BYTES)]

    def _receive(self, path: Path, size: int, source: int) -> str:
        data = torch.empty(size, dtype=torch.uint8)
        for part in data.split(MESSAGE_BYTES):
            self.wire.recv(part, source)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            data.numpy().tofile(path)
        except OSError as error:
            return f"rank {self.world.rank}: {error}"
        return ""

    def _remove_all_but(self, kept: Path | None) -> None:
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if path != kept:
                    shutil.rmtree(path, ignore_errors=True)


def _first(reasons: Iterable[str]) -> str:
    """Return the first of `reasons` that is not empty; "" if all are empty."""
    return next(filter(None, reasons), "")


def _place_in_time(name: str) -> tuple[int, int]:
    """Return the step of a copy and the time at which it was begun, from the name of the copy."""
    _, step, begun = name.split("-")
    return int(step), int(begun, 16)
