"""One start of the ranks: the launcher's process, the signals that are sent to this process, and
its result."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ptdmpi.base.launched import COPIES
from ptdmpi.supervise.guard import Guard, kill_session
from ptdmpi.supervise.output import LauncherOutput

# number of seconds within which the ranks must end after their launcher has ended
GRACE_S = 5.0


@dataclass(frozen=True)
class Ended:
    """The result of one start of the ranks, known when the launcher has ended. `code` is the
    launcher's exit code, or 128 + N if signal N ended the launcher. `failed` is True if a rank has
    reported an exception or a hang of the program. `silent` is True if no rank has printed its
    first line.
    """

    code: int
    failed: bool
    silent: bool = False


class LauncherStart:
    """A launcher with its ranks. The launcher runs in a separate session of the operating system,
    so Ctrl-C does not reach the launcher. Otherwise Open MPI's launcher would kill its ranks a
    quarter of a second after Ctrl-C, before they have saved."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `command`; raise OSError if it cannot be started."""
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self._guard = Guard(self.process.pid, environment.get(COPIES, ""))
        pipes = [(self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)]
        self.output = LauncherOutput(pipes, self.ask_to_stop)

    def ask_to_stop(self) -> None:
        """Ask the ranks to save and stop after the present step. This method sends SIGUSR1 to the
        launcher, which passes the signal to the ranks."""
        self._send(signal.SIGUSR1)

    def end(self) -> None:
        """Make the launcher end its ranks at once, by sending it SIGTERM."""
        self._send(signal.SIGTERM)

    def running(self) -> bool:
        """Return True until the launcher has ended."""
        return self.process.poll() is None

    def finish(self, quiet: bool) -> Ended:
        """Wait until the launcher has ended, and kill the remaining processes of its session on
        this machine. Return how the ranks ended.

        If no rank has reported why the job ended, print the launcher's notices. Do not print them
        if `quiet` is True, or if the exit code means success, bad input or a stop on request.
        """
        code = self.process.wait()
        # ranks that outlive the launcher would keep the run directory locked
        kill_session(self.process.pid, GRACE_S)
        self._guard.dismiss()
        self.output.finish(GRACE_S)
        if code < 0:
            code = 128 - code
        if not (quiet or self.output.said or code in (0, 2, 75)):
            self.output.tell()
        return Ended(code, self.output.failed, silent=not self.output.heard)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
