"""The lock of a run directory: one run at a time."""

import fcntl
import os

import pytest

from ptdmpi.config import InputError
from ptdmpi.watch import lock as module
from ptdmpi.watch.lock import RunLock


def test_a_second_run_waits_and_then_says_who_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    said = []
    first = RunLock(tmp_path / "run", said.append)
    assert said == []
    with pytest.raises(InputError, match=f"in use by process {os.getpid()} on .*, job 4711; legal"):
        RunLock(tmp_path / "run", said.append, wait_s=0.05)
    assert len(said) == 1 and "waiting" in said[0]
    first.close()
    RunLock(tmp_path / "run", said.append).close()
    assert len(said) == 1


def test_a_file_system_without_locks_lets_everyone_in(tmp_path, monkeypatch):
    def refuse(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    one, other = (RunLock(tmp_path, print) for _ in range(2))
    one.close()
    other.close()


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"run\.dir = "):
        RunLock(tmp_path / "file", print)
