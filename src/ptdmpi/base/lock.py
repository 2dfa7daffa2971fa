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
    """A lock on a file. A process holds the lock until the file is closed or the process ends.

    The file is created if it does not exist. The file contains the name of the process that has the
    lock. If the file system does not support locks, every process gets the lock.
    """

    def __init__(self, path: Path) -> None:
        """Open the file `path` without taking the lock. Raises OSError if the file cannot be
        created."""
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def take(self) -> bool:
        """Try to take the lock, without waiting. Return True if this process has the lock now,
        False if another process has it.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # an error that is not in `_HELD` means that this file system does not support locks, so
            # every process gets the lock
            if error.errno in _HELD:
                return False
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
        if job:
            holder += f", job {job}"
        # if the disk is full, the lock is taken, but the file does not name the process
        with suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, holder.encode(), 0)
        return True

    def holder(self) -> str:
        """Return the text in the lock file, which describes the process that has the lock. If the
        file is empty, return "another process"."""
        return os.pread(self._file, 200, 0).decode(errors="replace") or "another process"

    def still_there(self) -> bool:
        """Return True if the path still names this file. Return False if the file was removed or
        replaced. In that case another process can lock the new file, and two processes would work
        in the directory at the same time.
        """
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release the lock. The file is not removed. Otherwise two processes could hold locks at
        the same time: one on the removed file, and one on a new file of the same name."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
