"""The harness for parallel tests, run on a module of tests that pass, fail, hang and die."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import conftest
from tests import parallel as harness
from tests.parallel import ROOT, MpirunError, MpirunTimeout, mpirun, parallel

MODULE = """
import os
import time

import pytest

from tests.parallel import parallel


@parallel(ranks=[1, 2])
def test_before(comm):
    print(f"pid {os.getppid()}")


@parallel(ranks=[2])
@pytest.mark.parametrize("value", [1, 2])
def test_rank_1_fails(comm, value):
    culprit = "rank one" if comm.rank == 1 else "nobody"
    assert value == 1 or culprit == "nobody"


@parallel(ranks=[4], limit_s=2)
def test_rank_2_hangs(comm):
    print(f"rank {comm.rank} was here")
    stay_away() if comm.rank == 2 else comm.Barrier()


def stay_away():
    time.sleep(100)


@parallel(ranks=[2])
def test_rank_0_dies(comm):
    if comm.rank == 0:
        os._exit(7)
    comm.Barrier()


@parallel(ranks=[2])
def test_skips(comm):
    pytest.skip("no such device")


@parallel(ranks=[2])
def test_wants_fixture(comm, capsys):
    pass


@parallel(ranks=[1, 2])
def test_after(comm):
    print(f"pid {os.getppid()}")
"""


def is_alive(pid: str) -> bool:
    status = Path("/proc", pid, "status")
    return status.exists() and "State:\tZ" not in status.read_text()  # Z: ended, not yet reaped


def run_pytest(folder: Path, *options: str) -> tuple[int, str, dict[str, str]]:
    """Exit code, output and the word that pytest reports for each test of MODULE."""
    file = folder / "test_sample.py"
    file.write_text(MODULE)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-rPs", *options]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(file)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    words = re.findall(r"::(test\S+) (PASSED|FAILED|SKIPPED|ERROR)", done.stdout)
    return done.returncode, done.stdout, dict(words)


@parallel(ranks=[1, 2, 4, 8])
@pytest.mark.parametrize("value", [(1, 2), {"a": float("inf")}])
def test_every_rank_runs_the_body(comm, value, tmp_path):
    assert value in ((1, 2), {"a": float("inf")})  # arguments keep their types
    (tmp_path / str(comm.rank)).touch()
    comm.Barrier()
    assert {file.name for file in tmp_path.iterdir()} == {str(r) for r in range(comm.size)}
    assert comm.allreduce(1) == comm.size


@parallel(ranks=[2])
def test_messages_of_another_test_stay_away(comm):
    from mpi4py import MPI

    assert MPI.Comm.Compare(comm, MPI.COMM_WORLD) == MPI.CONGRUENT


@pytest.mark.long
def test_reports_each_kind_of_end(tmp_path):
    code, output, words = run_pytest(tmp_path)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert words == {
        "test_before[1]": "PASSED",
        "test_before[2]": "PASSED",
        "test_rank_1_fails[1-2]": "PASSED",
        "test_rank_1_fails[2-2]": "FAILED",
        "test_rank_2_hangs[4]": "FAILED",
        "test_rank_0_dies[2]": "FAILED",
        "test_skips[2]": "SKIPPED",
        "test_wants_fixture[2]": "FAILED",
        "test_after[1]": "PASSED",
        "test_after[2]": "PASSED",
    }, output

    assert "rank 0: passed, rank 1: failed" in output
    assert "rank 1 of 2 failed in test_rank_1_fails" in output
    assert "culprit = 'rank one'" in output
    assert "capsys: a parallel test has comm, tmp_path and parameters only" in output
    assert "no such device" in output

    assert output.count("ended by the time limit") == 1  # failures end at once
    hung = output.split("_ test_rank_2_hangs[4] _")[1].split("\n____")[0]
    stacks = re.split(r"-+ rank (\d) of 4 -+", hung)
    assert stacks[1::2] == ["0", "1", "2", "3"]
    for rank, stack in zip(stacks[1::2], stacks[2::2], strict=True):
        assert f"rank {rank} was here" in stack and "in test_rank_2_hangs" in stack
        assert ("in stay_away" in stack) == (rank == "2")
    assert "ended by the time limit of 2 s" in hung


@pytest.mark.long
def test_siblings_share_one_mpirun(tmp_path):
    code, output, words = run_pytest(tmp_path, "-k", "test_before or test_after")
    assert code == 0 and len(words) == 4, output
    pids = re.findall(r"pid (\d+)", output)
    assert len(pids) == 6 and len(set(pids)) == 2  # 2 tests x (1 + 2) ranks; one mpirun per size


@pytest.mark.long
def test_selected_test_runs_alone(tmp_path):
    code, output, words = run_pytest(tmp_path, "-k", "test_before[2]")
    assert code == 0 and words == {"test_before[2]": "PASSED"}, output


@pytest.mark.long
def test_none_begins_after_its_time(tmp_path):
    options = "-p", "tests.conftest", "--until", "0", "-k", "test_after"
    code, output, words = run_pytest(tmp_path, *options)
    assert code == 0 and words == {"test_after[1]": "SKIPPED", "test_after[2]": "SKIPPED"}, output
    assert "no time was left for it" in output and "pid " not in output


def test_each_kind_of_test_has_a_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    (tmp_path / "test_sample.py").write_text(MODULE + "\n\ndef test_starts():\n    mpirun(2)\n")
    (tmp_path / "test_plain.py").write_text("def test_plain():\n    pass\n")
    names = ["test_sample.py::test_after[1]", "test_sample.py::test_starts"]
    rooms = [conftest.room_of(name) for name in [*names, "test_plain.py::test_plain"]]
    assert rooms == ["one rank", "mpirun", "test_plain.py"]


def test_only_functions_of_a_module_that_take_comm():
    with pytest.raises(TypeError, match="first argument must be `comm`"):
        parallel(ranks=[1])(run_pytest)
    with pytest.raises(TypeError, match="only functions of a module"):
        parallel(ranks=[1])(lambda comm: None)


def test_mpirun_returns_output_and_environment():
    program = (
        "import os, sys; from mpi4py import MPI\n"
        "print(MPI.COMM_WORLD.size, sys.argv[1], os.environ['A'])"
    )
    done = mpirun(2, ["-c", program, "word"], env={"A": "b"})
    assert done.stdout.splitlines() == ["2 word b"] * 2


def test_mpirun_hands_on_the_exit_code():
    program = ["-c", "import sys; print('last words', file=sys.stderr); sys.exit(3)"]
    assert mpirun(2, program, check=False).returncode == 3
    with pytest.raises(MpirunError, match=r"exit code 3(.|\n)*last words"):
        mpirun(2, program)


def test_mpirun_time_limit_shows_stacks_and_leaves_nothing_behind():
    program = (
        "import os, time; from mpi4py import MPI\n"
        "print(os.getpid(), flush=True)\n"
        "MPI.COMM_WORLD.Barrier() if MPI.COMM_WORLD.rank else time.sleep(99)"
    )
    with pytest.raises(MpirunTimeout, match="time limit of 2 s") as caught:
        mpirun(3, ["-c", program], timeout_s=2)
    assert str(caught.value).count("(most recent call first)") == 3
    pids = re.findall(r"^\d+$", str(caught.value), re.MULTILINE)
    assert len(pids) == 3
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.long
def test_ending_pytest_ends_the_ranks(tmp_path):
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    pid_file = tmp_path / "pid"
    file = tmp_path / "test_long.py"
    file.write_text(
        "import os, time\nfrom tests.parallel import parallel\n\n"
        "@parallel(ranks=[1])\ndef test_long(comm):\n"
        f"    open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n    time.sleep(50)\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), str(file)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while not (pid_file.exists() and pid_file.read_text()) and process.poll() is None:
        time.sleep(0.1)
    process.terminate()
    assert process.wait(timeout=30) == 143
    assert not is_alive(pid_file.read_text())
