"""One rank of a disturbed run. The rank executes `ptdmpi train ...`, and kills itself at a chosen
point while a checkpoint is saved.

    python -m benchmarks.faults.rank PLACE COUNT RANK train CONFIG ...

PLACE is a key of PLACES, which lists the points of a save. Rank RANK sends itself SIGKILL when it
reaches PLACE for the COUNT-th time, so no buffer is flushed, and no signal handler runs. If PLACE
is `none`, no rank is killed. All ranks reach the place `write`. Only rank 0 reaches the other
places.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from ptdmpi.comm import launch

PLACES = {
    "write": "in the middle of a file",
    "manifest": "files written, no manifest yet",
    "rename": "manifest written, not renamed yet",
    "latest": "renamed, `latest` not moved yet",
    "discard": "in the middle of removing an old one",
}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _countdown(count: int) -> Callable[[], bool]:
    """Return a function that returns True only when it is called for the `count`-th time, and
    otherwise False."""
    calls = iter(range(1, count + 1))
    return lambda: next(calls, None) == count


def prepare(place: str, count: int, rank: int) -> None:
    """Make this process kill itself when it reaches the point `place` of a save for the `count`-th
    time. For this, the function that does this part of the save is replaced. At the place `write`,
    which all ranks reach, only the process of rank `rank` is killed."""
    from ptdmpi.checkpoint import boxes as data
    from ptdmpi.checkpoint import directory as files
    from ptdmpi.checkpoint import save

    now = _countdown(count)
    before = {"manifest": (save, "write_manifest"), "rename": (files, "publish")}
    if place in before:
        module, name = before[place]
        original = getattr(module, name)
        setattr(module, name, lambda *words: _die() if now() else original(*words))
    elif place == "write":
        write_block = data._write_block

        def write_half(file, values):
            if f"rank-{rank:05d}" in file.name.name and now():
                file.write(memoryview(values.tobytes())[: values.nbytes // 2])
                file.flush()
                _die()
            return write_block(file, values)

        data._write_block = write_half
    elif place == "latest":
        write_whole = files.write_whole

        def write_or_die(path: Path, text: str) -> None:
            if path.name == "latest" and now():
                _die()
            write_whole(path, text)

        files.write_whole = write_or_die
    elif place == "discard":
        remove = files._remove

        def remove_half(path: Path) -> None:
            if now():
                sorted(path.iterdir())[0].unlink()
                _die()
            remove(path)

        files._remove = remove_half


def main() -> None:
    """Prepare the kill that the first arguments describe, and run `ptdmpi` with the remaining
    arguments."""
    place = sys.argv[1]
    count = int(sys.argv[2])
    rank = int(sys.argv[3])
    sys.argv[1:] = sys.argv[4:]
    launch.prepare()
    prepare(place, count, rank)
    from ptdmpi.cli import main as ptdmpi

    ptdmpi()


if __name__ == "__main__":
    main()
