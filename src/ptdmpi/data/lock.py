"""One process at a time in a directory."""

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Self

_HELD = (errno.EACCES, errno.EAGAIN)


class FileLock:
    """Holds a file, which it makes and which says who holds it, until it is closed or the process
    ends. A file system without locks lets everyone in. Raises OSError if the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def take(self) -> bool:
        """Whether the lock is ours now."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # any other error: this file system knows no locks, and keeps nobody out
            if error.errno in _HELD:
                return False
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
        who = f"process {os.getpid()} on {socket.gethostname()}" + (f", job {job}" if job else "")
        with suppress(OSError):  # on a full disk nobody says who, and the lock holds as well
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, who.encode(), 0)
        return True

    def holder(self) -> str:
        """Who holds it."""
        return os.pread(self._file, 200, 0).decode(errors="replace") or "another process"

    def still_there(self) -> bool:
        """Whether the file still has its name: what was removed keeps nobody out."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Let go of it; the file stays, or two could hold two files of the same name."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
