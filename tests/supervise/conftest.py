"""A job under `ptdmpi run` with a stand-in for mpirun, which does what the test says at each
start."""

import os
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import IO

import pytest

from tests.parallel import ROOT

# `starts/N` has the Python of start N; `down/NAME` is there while a host is lost.
MPIRUN = f"""#!{sys.executable}
import json, os, signal, sys, time
from pathlib import Path
words = sys.argv[1:]
if words == ["--version"]:
    print("mpirun (Open MPI) 5.0.0")
    sys.exit()
if "rm" in words:  # of copies in memory, at the end
    sys.exit()
if words[-1] == "true":
    host = words[words.index("--host") + 1]
    busy = Path("busy", host)  # once
    sys.exit(Path("down", host).exists() or busy.exists() and (busy.unlink() or 1))
run = Path("r")
asked = []
signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))
with open("calls", "a") as calls:
    calls.write(" ".join(words) + "\\n")
number = len(open("calls").readlines())

ranks = int(words[words.index("-n") + 1])

def step(to, ranks=ranks):
    run.mkdir(exist_ok=True)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({{"step": to, "loss": 1.0, "rank_count": ranks}}) + "\\n")

def save(to):
    step(to)
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / "latest").write_text(f"step-{{to:08d}}\\n")

def done(to):
    step(to)
    (run / "done").write_text(json.dumps({{"steps": to}}))

def end(why):
    (run / "history.jsonl").write_text(json.dumps({{"attempt": 1, "event": "end", "why": why}}))
    os.utime(run / "history.jsonl", (0, 0))  # the clock of the file system is wrong

def wait(code=75):
    while not asked:
        time.sleep(0.01)
        if (run / "SAVE").exists():
            (run / "SAVE").unlink()
            save(2)
    sys.exit(code)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def fail():
    print("[rank 1 on n1] Traceback (most recent call last):", file=sys.stderr, flush=True)
    sys.exit(1)

exec(Path("starts", str(number)).read_text())
"""
CONFIG = """
[run]
steps = 9
dir = "r"
[model]
layers = 2
hidden = 16
heads = 2
seq_length = 8
[batch]
global_size = 8
[[data.train]]
path = "train"
"""


@pytest.fixture
def job(tmp_path):
    """Return a function that runs a job of 4 ranks whose starts do what its arguments say."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").write_text(MPIRUN)
    (tmp_path / "bin" / "mpirun").chmod(0o755)
    (tmp_path / "down").mkdir()
    (tmp_path / "starts").mkdir()
    (tmp_path / "config.toml").write_text(CONFIG)

    def run(
        *starts: str,
        options: tuple[str, ...] = (),
        n: int = 4,
        environ: Mapping[str, str] = MappingProxyType({}),
        output: IO[str] | int = subprocess.PIPE,
    ) -> subprocess.Popen:
        for number, text in enumerate(starts, 1):
            (tmp_path / "starts" / str(number)).write_text(text)
        path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
        kept = {"PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
        return subprocess.Popen(
            [sys.executable, "-m", "ptdmpi", "run", "-n", str(n), *options, "config.toml"],
            cwd=tmp_path,
            env={"PATH": path, "VIRTUAL_ENV": "/nowhere", **kept, **environ},
            stdout=output,
            stderr=output,
            text=True,
        )

    return run
