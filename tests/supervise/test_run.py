"""`ptdmpi run` with real ranks: exit codes, Ctrl-C in a terminal, and ranks that are killed."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests._mpirun import mpi_environment, mpirun
from tests.supervise._job import LIMIT_S, Job, environment, prepare, same, words

pytestmark = pytest.mark.together


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def undisturbed(folder):
    """The directory of a run under plain mpirun that nothing has disturbed."""
    command = ["-m", "ptdmpi", "train", "config.toml", "--set", "run.dir=undisturbed"]
    mpirun(2, command, cwd=folder, env=environment())
    return folder / "undisturbed"


@pytest.mark.long
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_killed_rank(folder, undisturbed, victim):
    run = f"killed-{victim}"
    with Job(folder, words("-n", "2", run=run)) as job:
        job.wait_for("step 10/24")
        os.kill(job.ranks()[victim], signal.SIGKILL)
        assert job.wait() == 0, job.text()
    assert job.text().count("starting 2 ranks again") == 1
    assert "resumed after step" in job.text()
    assert job.text().count("signal 9") == 1  # the launcher's notice, for no rank could say it
    assert "starting 2 ranks again" in (folder / run / "log.txt").read_text()
    same(folder / run, undisturbed)


def test_killed_rank_goes_on_from_memory(folder, undisturbed):
    """No checkpoint is written before the end: the copy in memory is all there is."""
    settings = ("checkpoint.every_steps=0", "checkpoint.memory_every_steps=1")
    options = [word for setting in settings for word in ("--set", setting)]
    with Job(folder, words("-n", "2", *options, run="memory")) as job:
        job.wait_for("step 10/24")
        os.kill(job.ranks()[1], signal.SIGKILL)
        assert job.wait() == 0, job.text()
        copies = job.copies
    assert "continues from the copy in memory of step" in job.text()
    assert not copies.exists()
    same(folder / "memory", undisturbed)


@pytest.mark.long
def test_stopped_rank_hangs_and_is_started_anew(folder, undisturbed):
    settings = ("run.stall_s=3", "checkpoint.memory_every_steps=1")
    options = [word for setting in settings for word in ("--set", setting)]
    with Job(folder, words("-n", "2", *options, run="hang")) as job:
        job.wait_for("step 10/24")
        os.kill(job.ranks()[1], signal.SIGSTOP)
        assert job.wait() == 0, job.text()
    assert "stall: " in job.text() and job.text().count("starting 2 ranks again") == 1
    same(folder / "hang", undisturbed)


def test_bad_input(folder):
    command = words("-n", "2", "--set", "model.heads=3", run="bad")
    ended = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 2
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("ptdmpi train: ")]
    assert [line.startswith("ptdmpi: error: ") for line in lines] == [True], ended.stderr
    assert not (folder / "bad").exists()


def test_ctrl_c_in_a_terminal(folder, undisturbed):
    command = words("-n", "2", run="asked")
    text, code = _in_terminal(folder, command, b"step 10/24")
    assert code == 75, text
    assert "SIGINT: stopping after this step" in text
    assert "stopped on request after step" in text
    ended = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 0, ended.stderr
    same(folder / "asked", undisturbed)


def _plain(run: str) -> list[str]:
    """Return the arguments of Python for a run in which no checkpoint is due before the end."""
    settings = ["--set", f"run.dir={run}", "--set", "checkpoint.every_steps=0"]
    return ["-m", "ptdmpi", "train", "config.toml", *settings]


@pytest.mark.long
def test_ctrl_c_under_plain_mpirun(folder, undisturbed):
    """The log says what Ctrl-C may lose. mpirun may end the ranks before they have saved; the same
    command then continues from the last checkpoint, or begins again."""
    command = ["mpirun", "-n", "2", sys.executable, *_plain("plain")]
    text, code = _in_terminal(folder, command, b" 5/24", mpi_environment())
    assert "Ctrl-C loses the steps since the last save" in text
    assert code != 0, text
    assert not (folder / "plain" / "done").exists()
    latest = folder / "plain/checkpoints/latest"
    if latest.exists():
        assert _step(latest) >= 5
    mpirun(2, _plain("plain"), cwd=folder)
    same(folder / "plain", undisturbed)


@pytest.mark.long
def test_plain_mpirun_that_waits(folder, undisturbed):
    """The signal that mpirun sends after Ctrl-C, with all the time that the ranks need: no step is
    lost."""
    command = ["mpirun", "-n", "2", sys.executable, *_plain("waits")]
    with Job(folder, command, **mpi_environment()) as job:
        job.wait_for(" 5/24")
        (rank,) = re.findall(r"kill -USR1 (\d+) on", job.text())
        os.kill(int(rank), signal.SIGTERM)
        assert job.process.wait(LIMIT_S) == 75, job.text()
    last = max(int(number) for number in re.findall(r"step +(\d+)/24 ", job.text()))
    assert last >= 5 and _step(folder / "waits/checkpoints/latest") == last
    mpirun(2, _plain("waits"), cwd=folder)
    same(folder / "waits", undisturbed)


def _step(latest: Path) -> int:
    return int(latest.read_text().strip().removeprefix("step-"))


def _in_terminal(folder, command, until: bytes, environ=None) -> tuple[str, int]:
    """Run a command in a terminal of its own, and press Ctrl-C once it has printed `until`."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, environ or environment())
    seen = b""
    pressed = False
    end = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < end:
            if not select.select([terminal], [], [], 1.0)[0]:
                continue
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # the terminal's last process has ended
                break
            seen += piece
            if until in seen and not pressed:
                os.write(terminal, b"\x03")
                pressed = True
        _, status = os.waitpid(child, 0)
    finally:
        os.close(terminal)
    return seen.decode(errors="replace"), os.waitstatus_to_exitcode(status)
