"""The checkpoints of a run as directories: which ones are complete, which is the newest, and which
may be removed.

    checkpoints/step-00000100/rank-00000.safetensors ... manifest.json
    checkpoints/latest                   the name of the newest checkpoint, for users and scripts
    checkpoints/best                     the name of the checkpoint with the lowest validation loss
    checkpoints/step-00000200.tmp        a checkpoint that is being written, or left by a crash
    checkpoints/step-00000100.replaced   an older save of this step; restored if a new save crashes
    checkpoints/step-00000100.damaged    damaged, and replaced by a newer save of this step
    checkpoints/step-00000100.abandoned  not continued: the run began anew, or at an earlier step
    checkpoints/branched_from            the checkpoint from which the run was resumed

When all files of a checkpoint are on the disk, one rename gives its directory the name
`step-NNNNNNNN`. Before a checkpoint is removed or replaced, one rename gives its directory another
name. A crash therefore never leaves an incomplete checkpoint in a directory called `step-NNNNNNNN`.
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
    """Return True if `name` is a possible name of a complete checkpoint: "step-00000100"."""
    return re.fullmatch(r"step-\d{8,}", name) is not None


def step_of(directory: Path) -> int:
    """Return the step of a checkpoint, from its name."""
    return int(directory.name.removeprefix("step-"))


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the checkpoints of a run, including damaged ones, in ascending order of steps."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if is_name(path.name)), key=step_of)


def of_run(directory: Path) -> list[Path]:
    """Return the checkpoints of a run that starts, as `checkpoints_in` does. Raise InputError if
    `directory` exists and is not a folder, because the run could not save into it."""
    if os.path.lexists(directory) and not directory.is_dir():
        raise InputError(
            f"{directory} is not a folder (a file, or a link that leads to no folder), so the run "
            "cannot save; remove it, or mount what it leads to"
        )
    return checkpoints_in(directory)


def missing_newest(directory: Path, existing: Collection[Path]) -> list[str]:
    """If the file `latest` names a missing checkpoint that is newer than all `existing` checkpoints
    of the run, return a list with a text that says so; otherwise return an empty list."""
    latest = directory / LATEST
    if not latest.is_file():
        return []
    name = latest.read_text(encoding="utf-8", errors="replace").strip()
    if not is_name(name) or os.path.lexists(directory / name):
        return []
    newest = max(map(step_of, existing), default=-1)
    if step_of(Path(name)) <= newest:
        return []
    return [f"{directory / name}: is missing, but {latest} names it"]


def named(path: Path) -> Path:
    """Return the checkpoint that a user names by its path, or by the file `latest` or `best`. If
    RUN/best does not exist, the path RUN/best stands for RUN/checkpoints/best. In the same way,
    RUN/latest stands for RUN/checkpoints/latest. Raise InputError if the file names no checkpoint,
    or if the run has no best checkpoint."""
    if path.name in (LATEST, BEST) and not path.exists():
        inside = path.parent / "checkpoints" / path.name
        if (
            path.name == BEST
            and not inside.exists()
            and any(checkpoints_in(folder) for folder in (inside.parent, path.parent))
        ):
            raise InputError(
                f"{path}: no checkpoint of this run was validated at its step, so none is the "
                "best; legal: set checkpoint.keep_best in the training run, or name the run "
                "directory for its newest checkpoint"
            )
        if inside.is_file():
            path = inside
    if path.is_file() and path.name in (LATEST, BEST):
        name = path.read_text(encoding="utf-8", errors="replace").strip()
        if not is_name(name):
            raise InputError(f"{path} names no checkpoint: it contains {name!r}")
        return path.parent / name
    return path


# -- writing and removing
# -----------------------------------------------------------------------------


def prepare(directory: Path, step: int, needed_bytes: int) -> Path:
    """Make an empty directory for the checkpoint of `step`, and return its path. Incomplete
    checkpoints that crashes have left are removed first.

    Raise InputError if the run directory is missing or the file system has fewer than
    `needed_bytes` free.
    """
    if not directory.parent.is_dir():
        raise InputError(f"{directory.parent} is gone")
    remove_leftovers(directory)
    require_space(directory, needed_bytes)
    temporary = directory / (name_of(step) + ".tmp")
    temporary.mkdir(parents=True)
    return temporary


def remove_leftovers(directory: Path) -> None:
    """Remove the incomplete checkpoints that crashes and failed saves have left. Do not call this
    function during a save, because the save would lose its files."""
    # remove the directories of incomplete checkpoints before a new file is written, because they
    # may fill the disk
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


def publish(temporary: Path, damaged: Collection[str] = ()) -> Path:
    """Give a completely written checkpoint its final name (see `give_name`), write this name to the
    file `latest`, and return the path of the checkpoint."""
    final = give_name(temporary, damaged)
    point(final)
    return final


def give_name(temporary: Path, damaged: Collection[str]) -> Path:
    """Give a completely written checkpoint its final name, and return its path.

    An older checkpoint with the same name is renamed. Later `point` removes the older checkpoint,
    unless its name is in `damaged`.
    """
    final = temporary.with_suffix("")
    if os.path.lexists(final):
        final.rename(_free_name(final, "damaged") if final.name in damaged else _replaced(final))
    # the rename is atomic (POSIX): the checkpoint does not exist before the rename, and is complete
    # after it
    temporary.rename(final)
    # a rename survives a power failure only if the directory that contains the name is synced to
    # the disk
    sync(final.parent)
    return final


def point(final: Path) -> None:
    """Write the name of the checkpoint `final` to the file `latest`. Then, if `give_name` has
    renamed an older checkpoint of the same step to `.replaced`, remove the older checkpoint."""
    write_whole(final.with_name(LATEST), final.name + "\n")
    if os.path.lexists(_replaced(final)):
        discard(_replaced(final))


def _replaced(final: Path) -> Path:
    return final.with_name(final.name + ".replaced")


def branch(directory: Path, source: Path | None, named: Path | None = None) -> None:
    """Rename all checkpoints in the run directory that are not part of the history of the run.
    There are such checkpoints if the run begins anew, resumes from one of its earlier checkpoints,
    or begins from a checkpoint of another run. Also record the checkpoint `source` that the
    run continues, and the path `named` that the user gave, because that path may mean another
    checkpoint later.

    Without the renaming, the next start would resume from the abandoned checkpoint with the highest
    step. If `source` is in this directory, `source` and all earlier checkpoints keep their names.
    `source` is None if the run began at step 0.
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
    """Return True if the run has resumed from the checkpoint at the path `named`, and has saved a
    new checkpoint since then.
    """
    marker = directory / BRANCHED_FROM
    if not marker.is_file():
        return False
    # treat a damaged file `branched_from` like a missing file
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
    """If a crash has interrupted the replacement of a checkpoint by a newer save of the same step,
    complete the replacement, or undo it if the newer save is missing."""
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
    """Yield the checkpoints that may be removed. The other checkpoints are kept: damaged or
    incomplete ones, the `keep` newest complete ones, those whose step is a multiple of
    `keep_every`, and those in `spared`. If `keep` is 0, no checkpoint may be removed."""
    kept = 0
    for path in reversed(checkpoints_in(directory)):
        if not keep:
            return
        regular = keep_every and step_of(path) % keep_every == 0
        # do not read the manifest of a checkpoint that is kept in any case, because a run may have
        # many such checkpoints
        if kept >= keep and (regular or path in spared):
            continue
        if path.name in damaged or not is_sound(path):
            continue
        kept += 1
        if kept > keep and not regular and path not in spared:
            yield path


def discard(directory: Path) -> None:
    """Remove a checkpoint. First rename it, so that a crash during the removal leaves no incomplete
    checkpoint with the name of a complete one."""
    name = directory.name.partition(".")[0] + ".tmp"
    gone = directory.with_name(name)
    if os.path.lexists(gone):
        _remove(gone)
    directory.rename(gone)
    _remove(gone)


def _remove(path: Path) -> None:
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except OSError as error:
        # the error of `rmtree` may name a file without its folder, so name the full path
        whole = path / (error.filename or "")
        raise OSError(error.errno, error.strerror, str(whole)) from None


def _free_name(final: Path, why: str) -> Path:
    names = (final.with_name(f"{final.name}.{why}{number}") for number in ("", *range(2, 10000)))
    return next(name for name in names if not os.path.lexists(name))
