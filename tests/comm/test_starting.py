"""A rank that dies before MPI is initialized, of a job whose launcher goes on without it."""

import resource
from pathlib import Path

import pytest

from ptdmpi.comm import launch, starting
from ptdmpi.config import InputError
from tests.parallel import mpirun

# Rank 1 dies by a signal as soon as it starts, or when watchers have seen all ranks.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path

def die_if_chosen():
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        os.kill(os.getpid(), signal.Signals[sys.argv[1]])

from ptdmpi.comm import starting
if sys.argv[2] == "at once":
    die_if_chosen()
with starting.watched():
    time.sleep(2.0)
    die_if_chosen()
    from mpi4py import MPI
print("came up", MPI.COMM_WORLD.size)
"""


@pytest.mark.together
@pytest.mark.parametrize(
    ("name", "when"),
    [
        pytest.param("SIGTERM", "at once", marks=pytest.mark.long),
        ("SIGKILL", "when all are there"),
    ],
)
def test_a_rank_that_dies_at_the_start_ends_the_job(tmp_path: Path, name: str, when: str):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = mpirun(
        2,
        [str(program), name, when],
        options=("--with-ft", "ulfm"),
        timeout_s=30.0,
        check=False,
    )
    assert done.returncode != 0 and "came up" not in done.stdout
    assert "died before MPI was initialized; start the same command again" in done.stderr


@pytest.mark.cases(1)
@pytest.mark.together
@pytest.mark.parametrize("options", [(), ("--with-ft", "ulfm")])
def test_ranks_that_live_come_up(tmp_path: Path, options: tuple[str, ...]):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("die_if_chosen()\n    from", "from"))
    done = mpirun(2, [str(program), "SIGTERM", "never"], options=options, timeout_s=60.0)
    assert done.stdout.count("came up 2") == 2 and "ptdmpi: error" not in done.stderr


def test_nothing_is_watched_without_a_launcher_that_goes_on(monkeypatch):
    monkeypatch.setattr(starting.subprocess, "Popen", None)
    for environ in ({}, {"OMPI_MCA_mpi_ft_enable": "1"}, {starting.JOB: "a"}):
        with starting.watched(environ):
            pass


@pytest.mark.parametrize("limit_kb", [1, 999_999])
def test_a_small_limit_on_memory_is_said_before_anything_is_loaded(monkeypatch, limit_kb):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit_kb * 1024, -1))
    with pytest.raises(
        InputError, match=rf"{limit_kb} kB, .* legal: unlimited, or at least 1000000"
    ):
        launch.prepare({})


@pytest.mark.parametrize("limit", [-1, 1_000_000 * 1024])
def test_a_sufficient_limit_on_memory_is_no_mistake(monkeypatch, limit):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, -1))
    launch.prepare({"HOME": "/"})
