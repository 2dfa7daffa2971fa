"""Start programs under mpirun with a time limit, and end all of their processes."""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 5.0  # for ranks to write their stacks, and for mpirun to clean up


class MpirunError(AssertionError):
    """A failure of the program under mpirun; the message has all of its output."""


class MpirunTimeout(MpirunError):
    """A time limit that has ended the program; the message has the stacks of all ranks."""


@functools.cache
def mpi_environment() -> dict[str, str]:
    """Return the environment of this process with the settings of jobs/mpi-env.sh."""
    environment = dict(os.environ)
    # Without buffers Python writes a line and its end separately, so lines of ranks would mix.
    environment.pop("PYTHONUNBUFFERED", None)
    if sys.prefix != sys.base_prefix:
        environment["VIRTUAL_ENV"] = sys.prefix
    dump = "import json, os; print(json.dumps(dict(os.environ)))"
    script = f'. "$0" && exec "{sys.executable}" -c "{dump}"'
    command = ["bash", "-c", script, str(ROOT / "jobs" / "mpi-env.sh")]
    found = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    # With the fault handler a crash, or SIGABRT after the time limit, prints all Python stacks.
    return json.loads(found.stdout) | {"PYTHONFAULTHANDLER": "1"}


def mpirun(
    ranks: int,
    args: Sequence[str],
    *,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    cwd: Path | None = None,
    options: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run `mpirun OPTIONS -n RANKS python ARGS...` and return its exit code and text output.

    `env` is added to the environment. Raise MpirunError if the exit code is not 0 and `check` is
    true. Raise MpirunTimeout, with the stacks of all ranks, after `timeout_s`.
    """
    end = time.monotonic() + timeout_s
    return launch(
        command_of(ranks, args, options),
        env=env or {},
        cwd=cwd,
        check=check,
        overdue=lambda: f"time limit of {timeout_s:g} s" if time.monotonic() > end else None,
    )


def command_of(ranks: int, args: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return the words of `mpirun OPTIONS -n RANKS python ARGS...`, with the MPI of the tests."""
    program = shutil.which("mpirun", path=mpi_environment()["PATH"])
    if program is None:
        raise MpirunError("no mpirun: run `make setup`, or load the site's MPI")
    return [program, *options, "-n", str(ranks), sys.executable, *args]


def launch(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None,
    check: bool,
    overdue: Callable[[], str | None],
) -> subprocess.CompletedProcess[str]:
    """Run a command in its own session until it ends or `overdue` returns a reason to end it."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            env={**mpi_environment(), **env},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        reason = None
        try:
            while process.poll() is None and (reason := overdue()) is None:
                time.sleep(0.1)
            if reason:
                _show_stacks(process)
        finally:
            if process.poll() is None:  # also after Ctrl-C; mpirun ends its ranks and cleans up
                process.terminate()
                _wait(lambda: process.poll() is not None)
            for pid in _session(process):
                _send(pid, signal.SIGKILL)
            process.wait()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read())
    result = subprocess.CompletedProcess(command, process.returncode, *texts)
    if reason or (check and result.returncode):
        how = f"ended by the {reason}" if reason else f"exit code {result.returncode}"
        message = "\n".join([f"{' '.join(command)}: {how}", *texts])
        raise MpirunTimeout(message) if reason else MpirunError(message)
    return result


def _show_stacks(process: subprocess.Popen) -> None:
    """Let every rank print its stacks and end.

    mpirun is stopped meanwhile, because it kills all ranks when the first one ends, before the
    others have printed.
    """
    ranks = [pid for pid in _session(process) if pid != process.pid]
    _send(process.pid, signal.SIGSTOP)
    for pid in ranks:
        _send(pid, signal.SIGABRT)
    _wait(lambda: not any(_is_alive(pid) for pid in ranks))
    _send(process.pid, signal.SIGCONT)
    _wait(lambda: process.poll() is not None)  # it forwards the output of the ranks


def _session(process: subprocess.Popen) -> list[int]:
    """Return the processes of the command's session; Open MPI makes process groups, no sessions."""
    members = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == process.pid:
                members.append(int(entry.name))
    return members


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended in the meantime
        os.kill(pid, number)


def _is_alive(pid: int) -> bool:
    try:
        status = Path("/proc", str(pid), "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tZ" not in status  # Z: it has ended, and its parent has not yet noticed


def _wait(done: Callable[[], bool]) -> None:
    end = time.monotonic() + GRACE_S
    while not done() and time.monotonic() < end:
        time.sleep(0.05)
