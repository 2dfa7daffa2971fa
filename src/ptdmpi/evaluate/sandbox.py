"""A sandbox for programs that a model wrote: a process of its own that inherits nothing.

Limits of time, memory, files and processes, a directory of its own, no network. It holds up
accidents and simple tricks; it is no prison for a program that was written to break out (files that
the user may read can be read): what is not trusted at all belongs into a container.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ptdmpi.config import InputError

INSIDE = Path(__file__).with_name("inside.py")
PASSED, TIMEOUT, KILLED = "passed", "timeout", "ended"


@cache
def without_network() -> tuple[str, ...]:
    """The command that starts another one where there is no network. Raises InputError where the
    system does not allow that."""
    tool = shutil.which("unshare")
    user = () if os.geteuid() == 0 else ("--user",)
    command = (tool or "unshare", *user, "--net")
    try:
        tried = subprocess.run((*command, "true"), capture_output=True, text=True, timeout=30)
        failure = tried.stderr.strip() if tried.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if failure:
        raise InputError(
            f"no process without network can be started here ({failure.splitlines()[0]}), and "
            "programs that a model wrote are about to run; legal: --allow-network, in a container "
            "or a machine that may be lost"
        )
    return command


@dataclass(frozen=True)
class Sandbox:
    """Limits of one program: seconds of time, bytes of memory, whether it may reach the network."""

    time_s: float = 5.0
    memory_bytes: int = 1 << 29
    network: bool = False

    def run(self, program: str) -> str:
        """PASSED if the program came to its end; else the kind of exception that ended it, TIMEOUT,
        or KILLED where it left without a word. Raises InputError as `without_network` does."""
        prefix = () if self.network else without_network()
        word = secrets.token_hex(16)  # which a program that only prints does not know
        with tempfile.TemporaryDirectory(prefix="ptdmpi-", ignore_cleanup_errors=True) as folder:
            os.chmod(folder, 0o777)  # for a user without rights
            said = self._said(prefix, folder, program.encode(errors="replace"), word.encode())
        if said is None:
            return TIMEOUT
        if said == word.encode():
            return PASSED
        return said.decode(errors="replace")[:80] or KILLED

    def _said(
        self, prefix: tuple[str, ...], folder: str, program: bytes, word: bytes
    ) -> bytes | None:
        """What the process wrote as its verdict; None where it had to be killed."""
        token, token_in = os.pipe()
        verdict_out, verdict = os.pipe()
        os.write(token_in, word)
        numbers = (token, verdict, self.memory_bytes, int(self.time_s) + 1)
        command = (*prefix, sys.executable, "-I", "-S", str(INSIDE), *map(str, numbers))
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
                pass_fds=(token, verdict),
                start_new_session=True,
            )
            try:
                process.communicate(program, timeout=self.time_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return None
            os.set_blocking(verdict_out, False)
            try:
                return os.read(verdict_out, 1024)
            except BlockingIOError:
                return b""
        finally:
            for end in (token, token_in, verdict_out, verdict):
                os.close(end)
