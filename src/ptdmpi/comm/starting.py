"""A process that watches the ranks during their start, and ends the job if a rank dies before MPI
is initialized.

Under `mpirun --with-ft ulfm` the launcher does not end a job that loses a rank, and the other ranks
wait for the lost rank in MPI_Init for ever. Each rank therefore starts a small process. This
process watches the ranks on its node until MPI is initialized, and ends the job if a rank is lost.
A thread could not watch the ranks, because MPI_Init holds Python's global lock. The process runs
this file as its program, so the file imports only the standard library.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

LOOK_S = 0.5  # pause in seconds between two checks of the ranks.
# Time limit in seconds for the launcher to start all ranks of a node; the launcher needs some
# milliseconds for each rank.
COMPLETE_S = 10.0
# Time limit in seconds for MPI_Init. If a whole node fails, its watchers fail with it. The watchers
# of the other nodes do not see this failure, so they end the job only when this limit is over.
LIMIT_S = 600.0
TURN_S = 2.0  # delay in seconds between the watchers of a node, which act one after the other
LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prte", "prted")
JOB, LOCAL_SIZE = "PMIX_NAMESPACE", "OMPI_COMM_WORLD_LOCAL_SIZE"
LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"


@contextlib.contextmanager
def watched(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Start a process that watches the ranks of this node while the body of the `with` block
    imports MPI.

    Start no process if the launcher ends the job itself when a rank is lost, as it does without the
    option `--with-ft ulfm`.
    """
    in_job = all(name in environ for name in (JOB, LOCAL_RANK, LOCAL_SIZE))
    keeps = environ.get("OMPI_MCA_mpi_ft_enable", "0").lower() in ("1", "true")
    if not (in_job and keeps):
        yield
        return
    # remove LOCAL_RANK from the environment, so that other watchers do not take this process for a
    # rank
    own = {name: value for name, value in environ.items() if name != LOCAL_RANK}
    program = [
        sys.executable,
        "-I",
        "-S",
        __file__,
        environ[JOB],
        environ[LOCAL_SIZE],
        environ[LOCAL_RANK],
    ]
    watcher = subprocess.Popen([*program, str(os.getpid())], env=own, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        watcher.communicate(b".")


def main(job: str, size: int, place: int, rank_pid: int) -> None:
    """Watch the `size` ranks of `job` on this node until a byte arrives on standard input; end the
    job if a rank is missing. `place` and `rank_pid` are the local number and the process id of the
    rank that started this watcher."""
    # ignore Ctrl-C in this process, because the ranks and their launcher handle it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launcher = launcher_of(rank_pid)
    begin = time.monotonic()
    complete = False
    reads = [sys.stdin.fileno()]
    while True:
        if select.select(reads, [], [], LOOK_S)[0]:
            if os.read(reads[0], 1):
                return
            reads = []  # standard input is closed: the rank that started this watcher has ended
        waited_s = time.monotonic() - begin
        living = ranks_of(job)
        complete = complete or len(living) == size
        if len(living) < size and (complete or waited_s > COMPLETE_S):
            reason = f"a rank on {socket.gethostname()} died before MPI was initialized"
        elif waited_s > LIMIT_S:
            reason = f"MPI was not initialized within {LIMIT_S:.0f} s: a rank may be lost"
        else:
            continue
        # Let the watchers of a node act one after the other. If several watchers signalled the
        # launcher, the launcher would print more lines.
        time.sleep(TURN_S * sum(other < place for other in living))
        end(launcher, reason)
        return


def end(launcher: int | None, reason: str) -> None:
    """Print the `reason` why the job ends, and terminate the launcher of the job. `launcher` is the
    launcher's process id. If `launcher` is None, because no launcher is on this node, only print
    the reason. If the launcher has already ended, do nothing."""
    with contextlib.suppress(ProcessLookupError):
        if launcher is not None:
            os.kill(launcher, 0)
        print(f"ptdmpi: error: {reason}; start the same command again", file=sys.stderr, flush=True)
        if launcher is not None:
            time.sleep(0.2)  # the launcher needs time to forward this line before it is terminated
            os.kill(launcher, signal.SIGTERM)


def ranks_of(job: str) -> set[int]:
    """Return the local numbers of the living ranks of a job on this node."""
    ranks = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            variables = environment(folder)
            if variables.get(JOB) == job and LOCAL_RANK in variables:
                ranks.add(int(variables[LOCAL_RANK]))
    return ranks


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variables of a process, or an empty dict if the process has ended or
    belongs to another user."""
    try:
        text = (folder / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    pairs = (line.partition("=") for line in text.split("\0"))
    return {name: value for name, _, value in pairs}


def launcher_of(pid: int) -> int | None:
    """Return the process id of the launcher, which is an ancestor of the rank with process id
    `pid`. Return None if no launcher is on this node."""
    while pid > 1:
        try:
            # in /proc/PID/stat the state and the parent's id follow the program's name in
            # parentheses, which may contain blanks
            name, _, rest = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")
        except OSError:
            return None
        if name.partition("(")[2] in LAUNCHERS:
            return pid
        pid = int(rest.split()[1])
    return None


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
