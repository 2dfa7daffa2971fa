"""A job under `ptdmpi run`: its folder, its processes, and its end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from ptdmpi.data.shard_writer import ShardWriter
from tests._mpirun import mpi_environment
from tests._runs import records, tensors
from tests.parallel import ROOT

CONFIG = """
[run]
name = "t"
steps = 24
reproducible = true
[model]
layers = 2
hidden = 16
heads = 2
seq_length = 8
dropout = 0.1
[batch]
global_size = 8
[optimizer]
learning_rate = 1e-2
[[data.train]]
path = "train"
[checkpoint]
every_steps = 4
"""
LIMIT_S = 150.0


def prepare(folder: Path) -> Path:
    """Write a configuration and a shard of random tokens into `folder`, and return it."""
    (folder / "train").mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG)
    ids = np.random.default_rng(1).integers(0, 52, 4000)
    path = folder / "train/shard-00000.h5"
    with ShardWriter(path, "t", "0" * 64, vocab_size=53, eod_id=52) as writer:
        writer.write(ids, np.array([len(ids)]))
    return folder


def words(*options: str, run: str) -> list[str]:
    """Return the words of `ptdmpi run OPTIONS config.toml` for the run directory `run`."""
    program = [sys.executable, "-m", "ptdmpi", "run"]
    return [*program, *options, "config.toml", "--set", f"run.dir={run}"]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a user who has set nothing for MPI."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    mpi = mpi_environment()
    kept = {key: value for key, value in mpi.items() if not key.startswith(("OMPI_", "PRTE_"))}
    return {**kept, "PYTHONPATH": paths, **more}


class Job:
    """`ptdmpi run` in the background; a context that ends it."""

    def __init__(self, folder: Path, command: list[str], **more: str) -> None:
        self.folder = folder
        self._copies = ""
        self.output = folder / "output.txt"
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment(**more),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            for pid in self.ranks().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()

    def text(self) -> str:
        """Return what the job has printed so far."""
        return self.output.read_text(errors="replace")

    def wait(self) -> int:
        """Return the exit code."""
        return self.process.wait(LIMIT_S)

    def wait_for(self, words: str, times: int = 1) -> None:
        """Wait until the output has `words` so many times."""
        end = time.monotonic() + LIMIT_S
        while self.text().count(words) < times:
            assert time.monotonic() < end and self.process.poll() is None, self.text()
            time.sleep(0.005)

    @property
    def copies(self) -> Path:
        """Return the folder of copies in memory; the ranks' environment has named it."""
        assert self._copies, "it has had no ranks"
        return Path(self._copies)

    def ranks(self) -> dict[int, int]:
        """Return the process id of each living rank of this job."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (process / "environ").read_bytes().split(b"\0")
                numbers = [v for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK=")]
                copies = [v for v in variables if v.startswith(b"PTDMPI_COPIES=")]
                if numbers and Path(os.readlink(process / "cwd")) == self.folder:
                    found[int(numbers[0].partition(b"=")[2])] = int(process.name)
                    self._copies = copies[0].partition(b"=")[2].decode()
        return found


def same(run: Path, undisturbed: Path, steps: int = 24) -> None:
    """Check that every step is recorded once, and that losses and the last state have equal
    bits."""
    found, expected = (
        [(one["step"], one["loss"], one["grad_norm"]) for one in records(path) if "loss" in one]
        for path in (run, undisturbed)
    )
    assert found == expected
    last = f"checkpoints/step-{steps:08d}"
    wanted, got = tensors(undisturbed / last), tensors(run / last)
    assert wanted.keys() == got.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)
