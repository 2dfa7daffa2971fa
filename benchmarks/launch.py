"""Functions that start the ranks of a benchmark by mpirun, with the settings of jobs/mpi-env.sh."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
# let Python cache compiled modules, which is its default
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
PEERS = ROOT / ".peers"  # has a folder for each other trainer that is compared with ptdmpi


def start(
    command: Sequence[str],
    output: IO[str] | int,
    *,
    cwd: Path = ROOT,
    extra: Mapping[str, str] | None = None,
    errors: IO[str] | None = None,
) -> subprocess.Popen[str]:
    """Start a program in a new session, so that all its processes can be found.

    `extra` is added to the environment. Standard input is empty, and standard output goes to
    `output`. Standard error goes to `errors` if it is given. Otherwise it also goes to `output`,
    or, if `output` is a pipe, to the standard error of this process.
    """
    if errors is None and output != subprocess.PIPE:
        errors_to: IO[str] | int | None = subprocess.STDOUT
    else:
        errors_to = errors
    # with this PYTHONPATH, `-m benchmarks...` works in any folder, and the program can import all
    # modules that this process can import
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    # Let Python buffer its output: without buffering, it writes a line and its line end separately,
    # so that lines of several ranks would mix.
    environment.pop("PYTHONUNBUFFERED", None)
    if sys.prefix != sys.base_prefix:
        environment["VIRTUAL_ENV"] = sys.prefix
    return subprocess.Popen(
        ["bash", "-c", '. "$0"; exec "$@"', str(ROOT / "jobs/mpi-env.sh"), *command],
        cwd=cwd,
        env={**environment, **(extra or {})},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors_to,
        start_new_session=True,
        text=True,
    )


def mpirun(ranks: int, words: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return the mpirun command that starts `python WORDS...` on `ranks` ranks. `options` are
    further options of mpirun."""
    return ["mpirun", *options, "-n", str(ranks), sys.executable, *words]


def answer(ranks: int, words: Sequence[str], limit_s: float = 1800.0) -> str:
    """Run `python WORDS...` on `ranks` ranks, and return the text that it writes to standard
    output.

    If the command fails, this program exits with a message. After `limit_s` seconds the ranks are
    terminated, and subprocess.TimeoutExpired is raised.
    """
    process = start(mpirun(ranks, words), subprocess.PIPE)
    try:
        text, _ = process.communicate(timeout=limit_s)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if process.returncode:
        sys.exit(f"the ranks ended with exit code {process.returncode}")
    return text


def living_ranks(process: subprocess.Popen[str]) -> dict[int, int]:
    """Return a dictionary that maps each rank of the mpirun `process` that is still running to its
    process id."""
    ranks = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # ignore a process that has ended in the meantime
            if entry.name.isdigit() and os.getsid(int(entry.name)) == process.pid:
                variables = (entry / "environ").read_bytes()
                if match := re.search(rb"OMPI_COMM_WORLD_RANK=(\d+)", variables):
                    ranks[int(match[1])] = int(entry.name)
    return ranks
