"""The checkpoints of the lowest validation losses: each manifest says its own, if it has one."""

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
    """What the manifest says of a checkpoint that was validated; nothing of others, or where the
    loss (nats per token) is not finite: such a checkpoint is never the best."""
    return {} if loss is None or not math.isfinite(loss) else {KEY: loss}


def best(directory: Path, count: int, damaged: Collection[str] = ()) -> list[Path]:
    """The `count` complete checkpoints of a run with the lowest validation losses, the lowest first
    (of equal ones the earliest). `damaged`: names of those that cannot be read."""
    found = []
    for path in files.checkpoints_in(directory) if count else ():
        with contextlib.suppress(InputError):
            loss = sound_manifest(path).said.get(KEY)
            if isinstance(loss, float) and path.name not in damaged:
                found.append((loss, files.step_of(path), path))
    return [path for *_, path in sorted(found)[:count]]


def point(directory: Path, damaged: Collection[str] = ()) -> None:
    """Have the file `best` name the best checkpoint that is there, in one rename; no file where no
    checkpoint was validated. Raises OSError."""
    found = best(directory, 1, damaged)
    if found:
        write_whole(directory / files.BEST, found[0].name + "\n")
    else:
        (directory / files.BEST).unlink(missing_ok=True)


def spared(directory: Path, count: int, damaged: Collection[str] = ()) -> list[Path]:
    """What retention must not touch: the `count` best ones, and what the file `best` names, also
    where nobody asks for best ones any more."""
    kept, pointer = best(directory, count, damaged), directory / files.BEST
    with contextlib.suppress(InputError):  # a damaged pointer names nothing
        kept += [files.named(pointer)] if pointer.is_file() else []
    return kept
