"""A lock file, so that only one process at a time works in a directory."""

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Self

_HELD = (errno.EACCES, errno.EAGAIN)


class FileLock:
    """A lock on a file, held until it is closed or the process ends.

    The file is made if it does not exist, and names the process that holds it. On a file system
    without locks every process gets the lock.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, without the lock. Raise OSError if it cannot be made."""
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def take(self) -> bool:
        """Try to take the lock; return True if this process has it now, False if another one does.

        The call returns at once in both cases.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # another error means that this file system has no locks, and then nobody is locked out
            if error.errno in _HELD:
                return False
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
        if job:
            holder += f", job {job}"
        with suppress(OSError):  # on a full disk the lock holds, without the name of its holder
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, holder.encode(), 0)
        return True

    def holder(self) -> str:
        """Return the text that the process with the lock has written about itself."""
        return os.pread(self._file, 200, 0).decode(errors="replace") or "another process"

    def still_there(self) -> bool:
        """Return True if the path still names this file; the lock on a removed file locks nobody
        out."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release the lock. The file stays, since two processes could otherwise lock two files of
        the same name."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
