"""Files that appear as a whole or not at all, and advice to the disk while they are written."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def start_writing_out(file: BinaryIO, start: int, end: int) -> None:
    """Have the kernel begin with bytes [start, end), which were written: the disk then works while
    we do, and the sync at the end has little left. Linux does so when told that written pages will
    not be needed; those that have reached the disk by then are dropped from memory."""
    os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


def sync(path: Path) -> None:
    """Have a file, or the names in a directory, outlive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(temporary: Path, path: Path) -> None:
    """Give a file that is written its name: its bytes reach the disk before the name does, so no
    crash leaves a part under it. Replace the file of that name. Raises OSError."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file next to `path`. The caller writes it, and at the end it
    replaces the file at `path`.

    If the block or the disk fails, the old file at `path` stays, and the temporary file is removed.
    The temporary name contains the process id, so two processes that write the same file do not
    disturb each other. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        put_in_place(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a small file, or replace it, as a whole: after a failure or a crash there is what was
    there before, or all of `content` (text as UTF-8). Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
