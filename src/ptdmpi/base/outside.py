"""One-line messages for errors whose cause is outside the program, such as a path, a disk or a
missing package.
"""

import errno
import importlib.metadata
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ptdmpi.base.errors import InputError

# For a loop of symbolic links, `Path.resolve` of Python 3.11 and 3.12 raises a RuntimeError whose
# text begins like this.
LOOP = "Symlink loop from "
PACKAGES = ("ptdmpi", "data_prep")
# The numbers of path errors that the user can correct. These errors are reported as bad input (exit
# code 2). Other errors, such as a full or broken disk, are reported as failures (exit code 1).
MENDABLE = {
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EROFS,
    errno.ESPIPE,  # `disk.open_file` raises this error for a pipe or a device
}


def explained(error: BaseException) -> tuple[str, int] | None:
    """Return a one-line message and an exit code for an error whose cause is outside the program.

    The cause of such an error is a missing package or MPI library, a path, a disk, or a child
    process that died. Return None for any other error.
    """
    if isinstance(error, ChildProcessError):
        return escaped(str(error)), 1
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if package in PACKAGES:
            return None
        return missing(package), 2
    if isinstance(error, RuntimeError | ImportError) and _loads_mpi(error):
        return (
            "no MPI library can be loaded: load the site's MPI module (MPI4PY_LIBMPI may name the "
            "library), or pip install 'ptdmpi[mpi]'",
            2,
        )
    if isinstance(error, MemoryError) or "failed to map segment" in str(error):
        return f"out of memory: {escaped(str(error) or type(error).__name__)}", 1
    if isinstance(error, RuntimeError) and str(error).startswith(LOOP):
        return escaped(str(error)), 2
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        text = escaped(f"{where}{error.strerror or error}")
        if error.errno in MENDABLE and error.filename:
            return text, 2
        return text, 1
    return None


def escaped(text: str) -> str:
    """Return the text as one line, with "\\n" in place of line ends, because a file name may
    contain line ends."""
    return "\\n".join(text.splitlines())


def _loads_mpi(error: Exception) -> bool:
    """Return True if mpi4py raised the error because it found no MPI library.

    Return False if a library was found, but did not start because another rank was lost.
    """
    where = "mpi4py" if isinstance(error, ImportError) else "_mpiabi"
    frames = traceback.extract_tb(error.__traceback__)
    return "MPI" in str(error) and any(where in frame.filename for frame in frames)


def missing(package: str) -> str:
    """Return a message that says how to install a missing package.

    The message names the smallest extra of ptdmpi that contains the package. If no extra contains
    the package, the message names the package itself.
    """
    extras: dict[str, set[str]] = {}
    for line in importlib.metadata.requires("ptdmpi") or []:
        named = re.match(r"[\w.-]+", line)
        extra = re.search(r'extra == [\'"](\w+)[\'"]', line)
        if named and extra and extra[1] != "test":
            extras.setdefault(extra[1], set()).add(named[0].lower())
    containing = [name for name, packages in extras.items() if package.lower() in packages]
    wanted = package
    if containing:
        smallest = min(containing, key=lambda name: len(extras[name]))
        wanted = f"'ptdmpi[{smallest}]'"
    return f"the package {package} is not installed: pip install {wanted}"


@contextmanager
def mendable_paths() -> Iterator[None]:
    """Return a context that replaces some OSErrors by InputError: errors about a path that the user
    can correct, such as a missing or unreadable file.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        explanation = explained(error)
        if explanation is None or explanation[1] != 2:
            raise
        raise InputError(explanation[0]) from error
