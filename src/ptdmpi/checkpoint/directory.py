"""The checkpoints of a run as directories: which ones are complete, which is the newest, and which
may be removed.

    checkpoints/step-00000100/rank-00000.safetensors ... manifest.json
    checkpoints/latest                   the name of the newest one, for users and scripts
    checkpoints/best                     that of the lowest validation loss (`checkpoint.keep_best`)
    checkpoints/step-00000200.tmp        being written, or left by a crash
    checkpoints/step-00000100.replaced   the same step was saved again; put back if a crash came
    checkpoints/step-00000100.damaged    the same, for one that was found damaged
    checkpoints/step-00000100.abandoned  the run was begun anew, or from an earlier step
    checkpoints/branched_from            the checkpoint that `checkpoint.resume` named then

A name `step-NNNNNNNN` appears by one rename, when the whole content is on the disk, and disappears
by one rename. A crash therefore never leaves an incomplete checkpoint with such a name.
"""

import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from ptdmpi.base.disk import sync, write_whole
from ptdmpi.base.words import file_size
from ptdmpi.checkpoint.manifest import is_sound
from ptdmpi.config import InputError

LATEST = "latest"
BEST = "best"
BRANCHED_FROM = "branched_from"


def name_of(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def is_name(name: str) -> bool:
    """Return True if `name` is the name of a complete checkpoint."""
    return re.fullmatch(r"step-\d{8,}", name) is not None


def step_of(directory: Path) -> int:
    """Return the step of a checkpoint, from its name."""
    return int(directory.name.removeprefix("step-"))


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the checkpoints of a run, including damaged ones, in ascending order of steps."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if is_name(path.name)), key=step_of)


def named(path: Path) -> Path:
    """Return the checkpoint that a user names by its path, or by the file `latest` or `best`.
    RUN/best means RUN/checkpoints/best. Raise InputError if the file names no checkpoint."""
    if path.name in (LATEST, BEST) and not path.exists():
        inside = path.parent / "checkpoints" / path.name
        if (
            path.name == BEST
            and not inside.exists()
            and any(checkpoints_in(folder) for folder in (inside.parent, path.parent))
        ):
            raise InputError(
                f"{path}: no checkpoint of this run was validated at its step, so none is the "
                "best; legal: checkpoint.keep_best while it trains, or the run directory for the "
                "newest one"
            )
        if inside.is_file():
            path = inside
    if path.is_file() and path.name in (LATEST, BEST):
        name = path.read_text(encoding="utf-8", errors="replace").strip()
        if not is_name(name):
            raise InputError(f"{path} names no checkpoint: it has {name!r}")
        return path.parent / name
    return path


# -- writing and removing
# -----------------------------------------------------------------------------


def prepare(directory: Path, step: int, needed_bytes: int) -> Path:
    """Make an empty directory for the checkpoint of `step`, and return it. Leftovers of crashes are
    removed first.

    Raise InputError if the file system has not enough space.
    """
    if not directory.parent.is_dir():
        raise InputError(f"{directory.parent} is gone")
    remove_leftovers(directory)
    require_space(directory, needed_bytes)
    temporary = directory / (name_of(step) + ".tmp")
    temporary.mkdir(parents=True)
    return temporary


def remove_leftovers(directory: Path) -> None:
    """Remove the leftovers of crashes and failed saves. This function must not be called during a
    save."""
    # remove leftovers before anything is written, because they may fill the disk
    for leftover in directory.glob("step-*.tmp"):
        _remove(leftover)


def require_space(directory: Path, needed_bytes: int) -> None:
    """Raise InputError unless the file system of `directory` has `needed_bytes` free."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if free < needed_bytes:
        raise InputError(
            f"a checkpoint needs {file_size(needed_bytes)}, {there} has {file_size(free)} free"
        )


def publish(temporary: Path, damaged: Collection[str]) -> Path:
    """Give a completely written checkpoint its name, then make `latest` name it; return its path.

    An older checkpoint with the same name is removed after the rename. If the name of the older
    checkpoint is in `damaged`, that checkpoint is kept under another name instead.
    """
    final = temporary.with_suffix("")
    replaced = final.with_name(final.name + ".replaced")
    if os.path.lexists(final):
        final.rename(_free_name(final, "damaged") if final.name in damaged else replaced)
    # the rename is atomic (POSIX): before it the checkpoint does not exist, after it it is complete
    temporary.rename(final)
    # a rename changes the directory, and survives a power failure only if the directory is synced
    sync(final.parent)
    write_whole(final.with_name(LATEST), final.name + "\n")
    if os.path.lexists(replaced):
        discard(replaced)
    return final


def branch(directory: Path, source: Path | None, named: Path | None = None) -> None:
    """Rename the checkpoints that the run does not continue. Record the checkpoint `source` that it
    continues, and the path `named` that the user gave: later, that path may mean another
    checkpoint.

    Without renaming, the checkpoints with the highest steps would be taken as the newest, and the
    next start would resume from them. If the source is in this directory, the checkpoints before it
    are kept. `source` is None if the run began at step 0.
    """
    last = _last_kept(directory, source)
    for path in checkpoints_in(directory):
        if step_of(path) > last:
            path.rename(_free_name(path, "abandoned"))
    marker = directory / BRANCHED_FROM
    if source is None:
        marker.unlink(missing_ok=True)
    else:
        names = dict.fromkeys(str(path.resolve()) for path in (source, named or source))
        write_whole(marker, "".join(f"{name}\n" for name in names))
    sync(directory)


def went_on_from(directory: Path, named: Path) -> bool:
    """Return True if the run has resumed from the checkpoint that the path `named` means, and has
    saved since then.
    """
    marker = directory / BRANCHED_FROM
    if not marker.is_file():
        return False
    # a damaged file `branched_from` is treated like a missing file
    names = marker.read_text(encoding="utf-8", errors="replace").splitlines()
    if str(named.resolve()) not in names:
        return False
    source = names[0]
    newest = max(map(step_of, checkpoints_in(directory)), default=-1)
    return newest > _last_kept(directory, Path(source))


def _last_kept(directory: Path, source: Path | None) -> int:
    if source is None or source.parent.resolve() != directory.resolve():
        return -1
    if not is_name(source.name):  # the file `branched_from` is damaged
        return -1
    return step_of(source)


def put_back(directory: Path) -> None:
    """Complete or undo the replacement of a checkpoint that a crash interrupted."""
    for replaced in directory.glob("step-*.replaced"):
        final = replaced.with_suffix("")
        if os.path.lexists(final):
            discard(replaced)
        else:
            replaced.rename(final)


def superfluous(
    directory: Path,
    keep: int,
    keep_every: int,
    *,
    damaged: Collection[str] = (),
    spared: Collection[Path] = (),
) -> Iterator[Path]:
    """Yield the checkpoints that need not be kept: complete ones that are not among the newest
    `keep` complete ones, not at a multiple of `keep_every` steps, and not in `spared`. `keep = 0`
    keeps all."""
    kept = 0
    for path in reversed(checkpoints_in(directory)):
        if not keep:
            return
        if path.name in damaged or not is_sound(path):
            continue
        kept += 1
        regular = kept <= keep or (keep_every and step_of(path) % keep_every == 0)
        if not regular and path not in spared:
            yield path


def discard(directory: Path) -> None:
    """Remove a checkpoint: first rename it, so that a crash leaves no incomplete checkpoint with
    its name."""
    name = directory.name.partition(".")[0] + ".tmp"
    gone = directory.with_name(name)
    if os.path.lexists(gone):
        _remove(gone)
    directory.rename(gone)
    _remove(gone)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _free_name(final: Path, why: str) -> Path:
    names = (final.with_name(f"{final.name}.{why}{number}") for number in ("", *range(2, 10000)))
    return next(name for name in names if not os.path.lexists(name))
