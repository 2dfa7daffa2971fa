"""A guard process: it ends the ranks of a job after the supervisor has been killed.

A launcher notices that its supervisor has been killed only when it passes on the next line of
output. While the ranks start, hang or compute a long step, they print no line: they would keep the
run directory locked, and the copies in memory would remain. The supervisor starts one guard for
each start of the ranks, and holds a pipe to it. The system closes the pipe when the supervisor
ends, however it ends. The file `guard.py` is also the program of the guard, so it imports only the
standard library.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

POLL_S = 0.05  # pause between two checks whether processes have ended
# After the supervisor's end the ranks get SAVE_S seconds to finish their step and save, then the
# launcher gets END_S seconds to end them. Then the guard kills the processes that remain.
SAVE_S = 20.0
END_S = 2.0
KILL_S = 5.0


class Guard:
    """The guard of one start of the ranks. `leader` is the process id of the launcher, which leads
    a session of the operating system. `copies` is the folder of copies in memory on this machine.
    """

    def __init__(self, leader: int, copies: str) -> None:
        """Start the guard, in a session of its own."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(leader), copies],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End the guard, because the supervisor itself has seen the end of the ranks."""
        with contextlib.suppress(OSError):  # the guard was killed
            self._process.communicate(b".")


def main(leader: int, copies: str) -> None:
    """Wait until the supervisor dismisses this guard or ends. If it ends, end the session of the
    launcher `leader` within SAVE_S + END_S + KILL_S seconds, and remove the folder `copies` ("": no
    folder)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if os.read(sys.stdin.fileno(), 1):
        return
    # the launcher passes SIGUSR1 on to all ranks, which then save and end; at SIGTERM it ends them
    for number, limit_s in ((signal.SIGUSR1, SAVE_S), (signal.SIGTERM, END_S)):
        if leader in session(leader):
            send(leader, number)
        if ended(leader, limit_s):
            break
    kill_session(leader, KILL_S)
    if copies:
        shutil.rmtree(copies, ignore_errors=True)


def ended(leader: int, limit_s: float) -> bool:
    """Wait until no process of a session is left, at most `limit_s` seconds. Return True if none is
    left."""
    end_s = time.monotonic() + limit_s
    while session(leader):
        if time.monotonic() > end_s:
            return False
        time.sleep(POLL_S)
    return True


def kill_session(leader: int, limit_s: float) -> None:
    """Kill the processes of a session, and wait at most `limit_s` seconds until they have ended."""
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
