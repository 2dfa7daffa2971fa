"""A sandbox for programs that a model has written: a separate process with its own environment.

The sandbox limits time, memory, files and processes. A program gets its own directory, no network
and no capabilities. The sandbox stops accidents and simple attacks, but not a program that was
written to break out of the sandbox. In particular, a program can make any system call. If root
starts the program, the program runs as the user `nobody`: it can read the files that all users may
read. The process keeps the folders of the interpreter's library open (`inside.keep_library`).
Through paths with `..`, the program can therefore read files in the folders around this library,
even in folders that `nobody` may not enter, if all users may read the files. If another user starts
the program, the program can read the files of this user. Run programs that are not trusted at all
in a container.
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
PASSED = "passed"
TIMEOUT = "timeout"
KILLED = "ended"


@cache
def without_network() -> tuple[str, ...]:
    """Return the beginning of a command line that runs another command without network.

    Raise InputError if the system does not allow commands without network.
    """
    tool = shutil.which("unshare")
    user = () if os.geteuid() == 0 else ("--user",)
    command = (tool or "unshare", *user, "--net")
    try:
        tried = subprocess.run((*command, "true"), capture_output=True, text=True, timeout=30)
        failure = ""
        if tried.returncode:
            failure = tried.stderr.strip()
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
    """The limits for one program: seconds, bytes of memory, and whether it may use the network."""

    time_s: float = 5.0
    memory_bytes: int = 1 << 29
    network: bool = False

    def run(self, program: str) -> str:
        """Run a Python program and return its outcome.

        The outcome PASSED means that the program ran to its end. TIMEOUT means that the program
        took too long. KILLED means that the program ended without a verdict. Any other outcome is
        the name of the exception that ended the program. Raise the same errors as
        `without_network`.
        """
        prefix = () if self.network else without_network()
        # `inside.py` writes this random word as the verdict if the program ran to its end. The
        # program cannot guess the word. To write the word itself, it would have to read the word
        # from a pipe.
        word = secrets.token_hex(16)
        with tempfile.TemporaryDirectory(prefix="ptdmpi-", ignore_cleanup_errors=True) as folder:
            # if root starts the program, the program runs as the user nobody, who must be able to
            # use the folder
            os.chmod(folder, 0o777)
            verdict = self._verdict(prefix, folder, program.encode(errors="replace"), word.encode())
        if verdict is None:
            return TIMEOUT
        if verdict == word.encode():
            return PASSED
        return verdict.decode(errors="replace")[:80] or KILLED

    def _verdict(
        self, prefix: tuple[str, ...], folder: str, program: bytes, word: bytes
    ) -> bytes | None:
        """Run the program in a separate process (`inside.py`), which does not import ptdmpi. Return
        the verdict that the process has written: `word` if the program ran to its end, b"" if there
        is no verdict. Return None if the process took too long and was killed. The command line of
        the process begins with `prefix`."""
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
