"""The end of ranks whose supervisor was killed: nothing of the job may remain."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ptdmpi.supervise.guard import session
from tests.parallel import ROOT

LIMIT_S = 60.0
# A launcher that ignores every request, and a rank of it that does the same.
DEAF = """
import signal, subprocess, sys, time
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
if sys.argv[1:] == ["launcher"]:
    subprocess.Popen([sys.executable, __file__, "rank"])
open(sys.argv[1], "w").close()
time.sleep(600)
"""


def until(true) -> None:
    """Wait until a condition holds."""
    end_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_killed_supervisor(job, tmp_path):
    """The ranks print no line, so that their launcher does not notice the death; the guard asks
    them to save, and removes the copies in memory."""
    copy = "folder = Path(os.environ['PTDMPI_COPIES']); folder.mkdir(); (folder / 'x').touch()\n"
    told = "Path('is').write_text(f'{os.getpid()} {folder}'); os.rename('is', 'ready')\n"
    process = job(f"{copy}{told}wait()")
    until((tmp_path / "ready").exists)
    launcher, copies = (tmp_path / "ready").read_text().split()
    try:
        assert session(int(launcher)) == [int(launcher)] and Path(copies).exists()
        process.kill()
        process.communicate(timeout=LIMIT_S)
        until(lambda: not session(int(launcher)) and not Path(copies).exists())
    finally:
        for pid in session(int(launcher)):
            os.kill(pid, signal.SIGKILL)


def _guarded(folder: Path, ending: Sequence[str]) -> tuple[subprocess.Popen, subprocess.Popen]:
    """Start a deaf launcher with a rank, and the guard of both with short limits; close the guard's
    pipe after the bytes `ending`. Return both processes."""
    (folder / "deaf.py").write_text(DEAF)
    launcher = subprocess.Popen(
        [sys.executable, str(folder / "deaf.py"), "launcher"], cwd=folder, start_new_session=True
    )
    until((folder / "rank").exists)
    (folder / "copies").mkdir()
    limits = "guard.SAVE_S, guard.END_S = 0.3, 0.3"
    text = f"from ptdmpi.supervise import guard; {limits}; guard.main({launcher.pid}, 'copies')"
    guard = subprocess.Popen(
        [sys.executable, "-c", text],
        cwd=folder,
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        start_new_session=True,
    )
    guard.communicate("".join(ending).encode(), timeout=LIMIT_S)
    return launcher, guard


@pytest.mark.parametrize("dismissed", [False, True])
def test_guard(tmp_path, dismissed):
    """Ranks that obey no request are killed; a guard that was dismissed does nothing."""
    launcher, guard = _guarded(tmp_path, "." if dismissed else "")
    try:
        assert guard.returncode == 0
        assert bool(session(launcher.pid)) == dismissed
        assert (tmp_path / "copies").exists() == dismissed
    finally:
        for pid in session(launcher.pid):
            os.kill(pid, signal.SIGKILL)
        launcher.wait(LIMIT_S)
