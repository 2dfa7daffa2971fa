"""The frozen model beneath adapters: its weights into a rank of any layout, and which they are."""

import hashlib
import json
from pathlib import Path

from ptdmpi.checkpoint.examine import newest
from ptdmpi.checkpoint.load import load_frozen, on_root
from ptdmpi.checkpoint.manifest import Manifest, sound_manifest
from ptdmpi.comm.communicator import Communicator
from ptdmpi.config import SharedInputError
from ptdmpi.lineage.adapted import Base
from ptdmpi.lineage.course import Course
from ptdmpi.model.state import WEIGHTS, State


def fingerprint(manifest: Manifest) -> str:
    """SHA-256 over what the manifest says of the weights: names, shapes, types, boxes and their
    checksums. Each box is held against its checksum when it is read, so this is of the values, too,
    without reading them twice; the same values in other boxes count as other ones."""
    found = [
        (name, one.shape, one.dtype, sorted((p.box.start, p.box.stop, p.crc32) for p in one.pieces))
        for name, one in sorted(manifest.tensors.items())
        if name.partition("/")[0].partition("@")[0] == WEIGHTS
    ]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def base_at(path: Path) -> tuple[Path, Base]:
    """The newest complete checkpoint that `path` names, and what it is. Raises InputError."""
    directory = newest(path)
    return directory, Base(str(directory), fingerprint(sound_manifest(directory)))


def take_base(
    state: State, world: Communicator, course: Course, tokenizer_sha256: str | None
) -> None:
    """Load the frozen weights from what `adapt.base` names, and have the course know them. Raises
    InputError on every rank. `tokenizer_sha256`: of the tokenizer that they know, where their
    checkpoint does not say so."""
    path = Path(course.config.adapt.base)
    directory, base = on_root(world, lambda: base_at(path))

    def judge(where: Path, manifest: Manifest) -> None:
        course.stand_on(base, where, manifest.said, tokenizer_sha256)

    loaded = load_frozen(state, world, directory, judge)
    if isinstance(loaded, str):
        raise SharedInputError(f"adapt.base = {path}: {loaded}")
