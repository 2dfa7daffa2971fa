"""One run at a time in a run directory."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from ptdmpi.config import InputError

# A job that is requeued starts while its predecessor dies; NFS lets go of a dead node's locks
# after 90 s.
WAIT_S = 100.0
POLL_S = 0.5
_HELD = (errno.EACCES, errno.EAGAIN)


class RunLock:
    """Holds `lock` in a run directory until it is closed or the process ends; the file says who.

    A file system without locks lets everyone in. Raises InputError if another run holds it for
    `wait_s` seconds on end, or the directory cannot be written.
    """

    def __init__(
        self, directory: Path, say: Callable[[str], None], wait_s: float = WAIT_S
    ) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise InputError(f"run.dir = {directory}: {error}") from None
        end, told = time.monotonic() + wait_s, False
        while not self._taken():
            holder = f"run.dir = {directory} is in use by {self._holder()}"
            if time.monotonic() >= end:
                self.close()
                raise InputError(f"{holder}; legal: another run.name, or end that run first")
            if not told:
                say(f"{holder}; waiting up to {wait_s:.0f} s for its end")
                told = True
            time.sleep(POLL_S)
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
        who = f"process {os.getpid()} on {socket.gethostname()}" + (f", job {job}" if job else "")
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, who.encode(), 0)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _HELD
        return True

    def _holder(self) -> str:
        return os.pread(self._file, 200, 0).decode(errors="replace") or "another run"

    def close(self) -> None:
        """Let go of it; the file stays, or two runs could hold two files of the same name."""
        os.close(self._file)
