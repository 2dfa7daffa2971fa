"""A guard process, which ends the ranks of a job if the supervisor is killed.

If the supervisor is killed, the launcher notices this only when it passes on the next line of
output. But ranks print no line while they start, hang or compute a long step. Without a guard, such
ranks would keep the run directory locked, and their in-memory copies of the state would remain. The
supervisor starts one guard each time it starts the ranks, and opens a pipe to it. The operating
system closes the pipe when the supervisor ends, even if it is killed. The file `guard.py` is also
the program of the guard process, so it imports only the standard library.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

POLL_S = 0.05  # pause between two checks whether processes have ended.
# If the supervisor has ended, the ranks get SAVE_S seconds to complete their step and save. Then
# the launcher gets END_S seconds to end them. Then the guard kills the remaining processes, and
# waits up to KILL_S seconds until they have ended.
SAVE_S = 20.0
END_S = 2.0
KILL_S = 5.0


class Guard:
    """The guard for one start of the ranks. `leader` is the process id of the launcher, which is
    the first process of a session of the operating system. `copies` is the folder of the in-memory
    copies on this machine.
    """

    def __init__(self, leader: int, copies: str) -> None:
        """Start the guard process in its own session of the operating system."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(leader), copies],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End the guard. The supervisor calls this method after it has ended the ranks itself."""
        with contextlib.suppress(OSError):  # the guard may have been killed
            self._process.communicate(b".")


def main(leader: int, copies: str) -> None:
    """Wait until the supervisor dismisses this guard or ends. If the supervisor ends, end the
    session of the launcher `leader` within SAVE_S + END_S + KILL_S seconds, and remove the folder
    `copies` (if it is not "")."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if os.read(sys.stdin.fileno(), 1):
        return
    # the launcher passes SIGUSR1 to all ranks, which then save and exit; after SIGTERM the launcher
    # kills the ranks
    for number, limit_s in ((signal.SIGUSR1, SAVE_S), (signal.SIGTERM, END_S)):
        if leader in session(leader):
            send(leader, number)
        if ended(leader, limit_s):
            break
    kill_session(leader, KILL_S)
    if copies:
        shutil.rmtree(copies, ignore_errors=True)


def ended(leader: int, limit_s: float) -> bool:
    """Wait until all processes of the session of `leader` have ended, but at most `limit_s`
    seconds. Return True if all have ended."""
    end_s = time.monotonic() + limit_s
    while session(leader):
        if time.monotonic() > end_s:
            return False
        time.sleep(POLL_S)
    return True


def kill_session(leader: int, limit_s: float) -> None:
    """Kill all processes of the session of `leader`. Wait until they have ended, but at most
    `limit_s` seconds."""
    end_s = time.monotonic() + limit_s
    while left := session(leader):
        for pid in left:
            send(pid, signal.SIGKILL)
        if time.monotonic() > end_s:
            return
        time.sleep(POLL_S)


def session(leader: int) -> list[int]:
    """Return the process ids of the running processes of an operating-system session on this
    machine. `leader` is the process id of the session's first process."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if os.getsid(int(entry.name)) == leader and not _is_zombie(entry):
                members.append(int(entry.name))
    return members


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process; do nothing if it has ended or belongs to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _is_zombie(process: Path) -> bool:
    return "State:\tZ" in (process / "status").read_text()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
