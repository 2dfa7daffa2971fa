"""The checkpoints with the lowest validation losses. The manifest of a checkpoint records its
validation loss, if the run has validated it."""

import contextlib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ptdmpi.base.disk import write_whole
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.manifest import sound_manifest
from ptdmpi.config import InputError

KEY = "validation_loss"


def in_manifest(loss: float | None) -> Mapping[str, Any]:
    """Return the entry of the manifest for a validation loss in nats per token. If the loss is None
    or not finite, the entry is empty, so the checkpoint is never chosen as the best one."""
    if loss is None or not math.isfinite(loss):
        return {}
    return {KEY: loss}


def best(directory: Path, count: int, damaged: Collection[str] = ()) -> list[Path]:
    """Return the `count` complete checkpoints of a run with the lowest validation losses, in
    ascending order of the loss. If losses are equal, the earlier step comes first. Checkpoints
    whose names are in `damaged` are skipped, because they could not be read."""
    if not count:
        return []
    validated = []
    for path in files.checkpoints_in(directory):
        with contextlib.suppress(InputError):
            loss = sound_manifest(path).said.get(KEY)
            if isinstance(loss, float) and path.name not in damaged:
                validated.append((loss, files.step_of(path), path))
    return [path for *_, path in sorted(validated)[:count]]


def point(directory: Path, damaged: Collection[str] = ()) -> None:
    """Write the name of the best checkpoint to the file `best`, by an atomic rename. Remove the
    file `best` if no checkpoint was validated. Raise OSError if the file cannot be written."""
    lowest = best(directory, 1, damaged)
    if lowest:
        write_whole(directory / files.BEST, lowest[0].name + "\n")
    else:
        (directory / files.BEST).unlink(missing_ok=True)


def spared(directory: Path, count: int, damaged: Collection[str] = ()) -> list[Path]:
    """Return the checkpoints that must not be removed: the `count` best ones, and the checkpoint
    that the file `best` names. The checkpoint named in `best` is kept even if the run no longer
    keeps its best checkpoints (`count` 0)."""
    kept = best(directory, count, damaged)
    pointer = directory / files.BEST
    if pointer.is_file():
        # a damaged file `best` names no checkpoint; then only the `count` best checkpoints are kept
        with contextlib.suppress(InputError):
            kept.append(files.named(pointer))
    return kept
