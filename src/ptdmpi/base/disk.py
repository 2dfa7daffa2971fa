"""Functions that write files so that a crash leaves either the old or the new file, never an
incomplete file. `start_writing_out` asks the kernel to write a file to the disk early. `open_file`
and `read_file` refuse paths that are not regular files. `regular_files` lists a directory tree."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Literal

from ptdmpi.base.errors import InputError
from ptdmpi.base.words import counted


def home_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the user's home folder: HOME, or the folder in the system's user database. Return "/"
    if neither is known, for example in a container whose user id is not in the database."""
    home = environ.get("HOME") or os.path.expanduser("~")
    return Path(home if os.path.isabs(home) else "/")


def user_cache() -> Path:
    """Return the folder of this user's cache for ptdmpi, as defined by the XDG base directory
    specification. The folder need not exist."""
    folder = os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache"
    return Path(folder) / "ptdmpi"


def start_writing_out(file: BinaryIO, start: int, end: int) -> None:
    """Start writing bytes [start, end) of a file to the disk in the background. The disk then
    writes while the program computes, and a later `sync` has little left to write. The function
    advises the kernel (`posix_fadvise`) that the program no longer needs these bytes in the page
    cache. Linux then starts to write the changed pages to the disk, and frees the pages that are
    already there."""
    os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


def sync(path: Path) -> None:
    """Wait until a file is on the disk, so that it survives a crash. For a directory, wait until
    its list of file names is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a complete temporary file to `path`, and replace an existing file of that name. The
    content of the file is written to the disk before the file gets its new name, so a crash leaves
    no incomplete file under this name. Raises OSError if the disk fails."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file in the directory of `path`. The caller writes the
    temporary file. At the end of the block, the temporary file replaces the file at `path`.

    If the block or the disk fails, the old file at `path` stays, and the temporary file is removed.
    The temporary name contains the process id, so two processes that write the same file do not
    disturb each other. If `path` is a symbolic link to a file, the file is replaced, and the link
    stays. If `path` is a symbolic link to a directory, the link itself is replaced. This case
    occurs in run directories of earlier versions of ptdmpi, in which `latest` was a link to the
    newest checkpoint. Raises OSError if the disk fails. Also raises OSError if `path` is a
    directory, a pipe or a device, because the temporary file must not replace one of these.
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
    """Write or replace a small file. Text is encoded as UTF-8. After a failure or a crash, the file
    has either its old content or the complete new content. Raises OSError if the file cannot be
    written."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def open_file(path: Path, mode: Literal["rb", "ab"]) -> FileIO:
    """Open a file without a buffer. Raise OSError for a pipe or a device, because reading from it
    could block forever or never end."""
    with contextlib.suppress(FileNotFoundError):
        _require_file(path, path.stat())

    def at_once(name: str, flags: int) -> int:
        """Open the file with O_NONBLOCK. A pipe may have replaced the file since the check above,
        and opening a pipe could wait forever without O_NONBLOCK."""
        try:
            return os.open(name, flags | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a pipe that no process reads
                _require_file(path, path.stat())
            raise

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, mode, buffering=0, opener=at_once))
        _require_file(path, os.fstat(file.fileno()))
        stack.pop_all()
    return file


def _require_file(path: Path, status: os.stat_result) -> None:
    """Raise OSError if `path` is a pipe or a device. `status` is the result of `os.stat` for
    `path`. Directories need no check, because `open` raises OSError for a directory."""
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError(errno.ESPIPE, "is a pipe or a device, not a file", str(path))


def why_unusable(path: Path) -> str:
    """Return a text that says what `path` is, such as "is a pipe or a device". `path` is an entry
    of a directory, and is neither a regular file nor a directory. An error message has the name of
    the entry and then this text."""
    return "is a pipe or a device" if path.exists() else "is a link to a missing file"


def read_file(path: Path) -> bytes:
    """Return the content of a file. Raises OSError if the file cannot be read, or is a pipe or a
    device."""
    with open_file(path, "rb") as file:
        return file.read()


def regular_files(
    directory: Path, wanted: Callable[[Path], bool] = lambda path: True
) -> list[Path]:
    """Return the files of a directory tree for which `wanted` is True, in sorted order. Links to
    files are followed.

    Raise InputError for a link to a folder, for a folder that cannot be read, and for a wanted file
    that is a pipe, a device, or a link to a missing file.
    """

    def unreadable(error: OSError) -> None:
        """Raise InputError for a folder that cannot be listed."""
        raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from error

    paths: list[Path] = []
    for folder, folders, files in os.walk(directory, onerror=unreadable):
        folders.sort()
        for linked in (Path(folder) / name for name in folders):
            if linked.is_symlink():
                raise InputError(
                    f"{linked}: is a link to a folder, which is not followed; remove the link, or "
                    "replace it by the folder"
                )
        paths += filter(wanted, (Path(folder) / name for name in sorted(files)))
    unusable = [path for path in paths if not path.is_file()]
    if unusable:
        number = counted(len(unusable), "unusable file")
        reason = why_unusable(unusable[0])
        raise InputError(f"{unusable[0]}: {reason} ({number} in {directory}); replace or remove it")
    return paths
