"""Signals that arrive while a program is still importing its modules."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel import ROOT
from tests.supervise._job import prepare

LIMIT_S = 120.0
ENTRIES = {"ptdmpi": "ptdmpi.__main__", "ptdmpi-data": "data_prep"}
# A package `click` that gets a signal while it is imported, and is then the real package.
CLICK = """
import os, sys, time
os.kill(os.getpid(), {number})
time.sleep(0.2)
sys.path = [path for path in sys.path if path != {folder!r}]
del sys.modules["click"]
import click
"""


def interrupted(
    folder: Path, program: str, *words: str, number: signal.Signals
) -> subprocess.CompletedProcess:
    """Run a program that gets a signal during its imports."""
    stub = folder / "stub"
    (stub / "click").mkdir(parents=True)
    text = CLICK.format(number=int(number), folder=str(stub))
    (stub / "click" / "__init__.py").write_text(text)
    paths = os.pathsep.join([str(stub), str(ROOT / "src"), str(ROOT)])
    # a shell's background jobs ignore SIGINT, and so would this program
    attended = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{attended}; from {ENTRIES[program]} import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.parametrize("program", ENTRIES)
def test_ctrl_c_during_imports(program, tmp_path):
    ended = interrupted(tmp_path, program, "--version", number=signal.SIGINT)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == f"{program}: interrupted\n"


def test_installed_programs_begin_at_the_entries():
    text = (ROOT / "setup.py").read_text()
    for program, module in ENTRIES.items():
        assert f'"{program} = {module}:main"' in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_preemption_before_the_supervisor_can_handle_it(number, tmp_path):
    """Exit code 75, and no rank is started: nothing is in the folder of the run."""
    folder = prepare(tmp_path / "job")
    words = ("run", "-n", "2", "config.toml", "--set", "run.dir=early")
    ended = interrupted(folder, "ptdmpi", *words, number=number)
    assert ended.returncode == 75, ended.stderr
    assert f"{number.name}: stopping" in ended.stderr and not (folder / "early").exists()


@pytest.mark.long
def test_a_preemption_before_a_rank_can_handle_it(tmp_path):
    """The rank takes the usual way to stop, before its first step: it has trained nothing."""
    folder = prepare(tmp_path / "job")
    words = ("train", "config.toml", "--set", "run.dir=early")
    ended = interrupted(folder, "ptdmpi", *words, number=signal.SIGTERM)
    assert ended.returncode == 75, ended.stderr
    assert "SIGTERM on rank 0" in ended.stdout and "Traceback" not in ended.stderr


def test_other_commands_end_at_once(tmp_path):
    ended = interrupted(tmp_path, "ptdmpi", "schedule", number=signal.SIGTERM)
    assert ended.returncode == -signal.SIGTERM


STREAMS = """
import os, sys
from ptdmpi.base import early

early.begin("ptdmpi")
file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
print("lost"), print("lost", file=sys.stderr)
os.write(1, b"lost"), os.write(2, b"lost")
assert sys.stdin.read() == "" and not sys.stdout.isatty() and not sys.stderr.isatty()
assert os.system("test -e /dev/fd/0 -a -e /dev/fd/1 -a -e /dev/fd/2") == 0
os.write(file, f"{file}".encode())
"""


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-", "<&-"])
def test_a_missing_stream_is_not_the_number_of_a_file(closed, tmp_path):
    """Whatever a library prints, the file that is opened next contains only its own bytes."""
    (tmp_path / "program.py").write_text(STREAMS)
    command = f"exec {sys.executable} program.py file {closed}"
    ended = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=LIMIT_S
    )
    assert ended.returncode == 0
    assert int((tmp_path / "file").read_text()) >= 3
