"""One run at a time in a run directory."""

import time
from collections.abc import Callable
from pathlib import Path

from ptdmpi.config import InputError
from ptdmpi.data.lock import FileLock

# A job that is requeued starts while its predecessor dies; NFS lets go of a dead node's locks
# after 90 s.
WAIT_S = 100.0
POLL_S = 0.5


class RunLock:
    """Holds `lock` in a run directory until it is closed or the process ends; the file says who.

    A file system without locks lets everyone in. Raises InputError if another run holds it for
    `wait_s` seconds on end, or the directory cannot be written.
    """

    def __init__(self, directory: Path, say: Callable[[str], None], wait_s: float = WAIT_S) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(directory / "lock")
        except OSError as error:
            raise InputError(f"run.dir = {directory}: {error}") from None
        end, told = time.monotonic() + wait_s, False
        while not self._lock.take():
            holder = f"run.dir = {directory} is in use by {self._lock.holder()}"
            if time.monotonic() >= end:
                self.close()
                raise InputError(f"{holder}; legal: another run.name, or end that run first")
            if not told:
                say(f"{holder}; waiting up to {wait_s:.0f} s for its end")
                told = True
            time.sleep(POLL_S)

    def close(self) -> None:
        """Let go of it."""
        self._lock.close()
