"""The environment variables that MPI programs need. Their values are only in the script
`jobs/mpi-env.sh`, which this module runs."""

import errno
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from ptdmpi.base.launched import COPIES
from ptdmpi.config import InputError

SCRIPT = "mpi-env.sh"
# Environment variables that a rank on another host also needs. By default, Open MPI passes only its
# own variables to such a rank.
PASSED_ON = ("OMP_NUM_THREADS", "MPI4PY_LIBMPI", "PYTHONPATH", COPIES)
MEMORY = Path("/dev/shm")
# The environment variables that may name the folder of mpirun's temporary files. The first variable
# that is set determines the folder.
TEMPORARY = ("TMPDIR", "TEMP", "TMP")
TEMPORARY_BYTES = 16384  # free bytes that mpirun's small files need


def jobs_folder() -> Path:
    """Return the folder of the job scripts, `jobs/` in a clone or in the installed package. Raise
    InputError if neither folder exists.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "jobs", package.parents[1] / "jobs"):
        if (folder / SCRIPT).is_file():
            return folder
    raise InputError(f"{SCRIPT} is not installed: install the package again")


def mpi_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a copy of `environ` with the settings of `mpi-env.sh`. Variables that are already set
    keep their values. Raise InputError if bash cannot run the script."""
    environment = dict(environ)
    if sys.prefix != sys.base_prefix:
        environment.setdefault("VIRTUAL_ENV", sys.prefix)
    dump = "import json, os; print(chr(10) + json.dumps(dict(os.environ)))"
    command = [
        "bash",
        "-c",
        f'. "$0" && exec "{sys.executable}" -Sc "{dump}"',
        str(jobs_folder() / SCRIPT),
    ]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True)
    # use only the last line of the output, because the file that BASH_ENV names may print other
    # lines
    _, _, last = printed.stdout.rstrip("\n").rpartition("\n")
    try:
        variables: dict[str, str] = json.loads(last)
    except ValueError:
        said = " ".join(printed.stderr.split()) or f"exit code {printed.returncode}"
        raise InputError(f"{SCRIPT}: bash cannot run it: {said}; is BASH_ENV set?") from None
    return variables


def unusable_temporary_folder(environ: Mapping[str, str]) -> str:
    """Return "" if the launcher can write its temporary files; otherwise return a line with the
    reason.

    Open MPI's mpirun cannot start without such files, and its own messages do not name the folder.
    """
    names = (environ[name] for name in TEMPORARY if environ.get(name))
    folder = Path(next(names, "/tmp"))
    existing = folder
    while not existing.exists():  # mpirun creates missing folders
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing, buffering=0) as file:
            if file.write(bytes(TEMPORARY_BYTES)) < TEMPORARY_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        return (
            f"temporary folder {folder}: {error.strerror}: mpirun cannot write its files; free "
            "space, or set TMPDIR to another folder"
        )
    return ""


def folder_of_copies() -> str:
    """Return the path of a folder in a node's memory (in the in-memory file system /dev/shm). No
    other job uses the same path."""
    return str(MEMORY / f"ptdmpi-{os.getuid()}-{uuid.uuid4().hex}")
