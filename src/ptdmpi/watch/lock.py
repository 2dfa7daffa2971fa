"""The lock of a run directory, so that only one run uses the directory at a time."""

import time
from collections.abc import Callable
from pathlib import Path

from ptdmpi.base.lock import FileLock
from ptdmpi.config import InputError

# Number of seconds for which a run waits for the lock. A job that Slurm has requeued may start
# before the previous job has ended, and NFS releases the locks of a dead node only after 90 s.
WAIT_S = 100.0
POLL_S = 0.5


class RunLock:
    """A lock on the file `lock` in a run directory. The process holds the lock until `close` is
    called or the process ends.

    The file contains the name of the process that has the lock. If the file system does not support
    locks, every process gets the lock. The constructor waits up to `wait_s` seconds for the lock.
    It raises InputError if another run still has the lock after this time, or if the directory
    cannot be written.
    """

    def __init__(self, directory: Path, say: Callable[[str], None], wait_s: float = WAIT_S) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(directory / "lock")
        except OSError as error:
            raise InputError(f"run.dir = {directory}: {error}") from None
        end_s = time.monotonic() + wait_s
        announced = False
        while not self._lock.take():
            holder = f"run.dir = {directory} is in use by {self._lock.holder()}"
            if time.monotonic() >= end_s:
                self.close()
                raise InputError(f"{holder}; legal: another run.name, or end that run first")
            if not announced:
                say(f"{holder}; waiting up to {wait_s:.0f} s for its end")
                announced = True
            time.sleep(POLL_S)

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()
