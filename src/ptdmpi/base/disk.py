"""Functions that write files so that a crash leaves either the old or the new file, never an
incomplete one. Other functions advise the kernel while a file is written, and open paths that may
be no regular files.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Literal


def start_writing_out(file: BinaryIO, start: int, end: int) -> None:
    """Start writing bytes [start, end) of a file to the disk in the background. The disk then works
    while the program does, and little is left for the sync at the end. Linux starts writing when
    posix_fadvise says that written pages will not be needed. `posix_fadvise` also drops pages from
    memory that are already on the disk."""
    os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory, so that they survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a complete temporary file to `path`, and replace the file of that name. The bytes
    reach the disk before the name does, so a crash leaves no incomplete file under this name.
    Raises OSError."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file next to `path`. The caller writes the temporary file, and
    at the end it replaces the file at `path`.

    If the block or the disk fails, the old file at `path` stays, and the temporary file is removed.
    The temporary name contains the process id, so two processes that write the same file do not
    disturb each other. A symbolic link to a file stays a link: the file is replaced. A link to a
    directory is replaced itself, because earlier versions made such a link of `latest`. Raises
    OSError, also for a directory, a pipe or a device: the rename would remove the device.
    """
    if not (path.is_symlink() and path.is_dir()):
        path = Path(os.path.realpath(path))
        with contextlib.suppress(FileNotFoundError):
            kind = path.stat().st_mode
            if stat.S_ISDIR(kind):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if not stat.S_ISREG(kind):
                raise OSError(errno.ESPIPE, "is a pipe or a device, not a file", str(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        put_in_place(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write or replace a small file in one step. After a failure or a crash the file has either its
    old content or all of `content` (text as UTF-8). Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def open_file(path: Path, mode: Literal["rb", "ab"]) -> FileIO:
    """Open a file, unbuffered. Raise OSError for a pipe or a device, which could block the program
    for ever, or have no end."""
    with contextlib.suppress(FileNotFoundError):
        kind = path.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # for a directory, `open` raises OSError
            raise OSError(errno.ESPIPE, "is a pipe or a device, not a file", str(path))
    return open(path, mode, buffering=0)


def read_file(path: Path) -> bytes:
    """Return the content of a file. Raises OSError, also for a pipe or a device."""
    with open_file(path, "rb") as file:
        return file.read()
