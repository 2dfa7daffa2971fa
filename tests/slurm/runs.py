"""Small trainings as jobs of a virtual Slurm, their undisturbed twins, and their bits."""

import contextlib
import json
import os
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open

from ptdmpi.data.shard_writer import ShardWriter
from tests.parallel import ROOT, mpirun
from tests.slurm.cluster import Cluster, wait_until

# Two ranks on two nodes as one pipeline: each step needs both.
CONFIG = """
[run]
steps = 200
[model]
layers = 4
hidden = 64
heads = 4
seq_length = 64
dropout = 0.1
[parallel]
pipeline = 2
[batch]
global_size = 16
micro_size = 4
[log]
every_steps = 50
[[data.train]]
path = "train"
[checkpoint]
every_steps = 40
"""
TEMPLATE = "slurm-cpu.sbatch"
# What the machine of this test is, in place of the template's settings.
MACHINE = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--time=10")
# The same machine, for `ptdmpi submit`.
SITE = """
scheduler = "slurm"
account = ""
time = "00:10:00"
launch = "srun --mpi=pmix"
[node]
ranks = 1
cores = 1
"""
START_LIMIT_S = 90.0  # ranks that share two cores with other work import torch slowly


def corpus(folder: Path) -> Path:
    """A folder with random shards and the configuration `config.toml`."""
    (folder / "train").mkdir(parents=True)
    tokens = 20000
    ids = np.random.default_rng(1).integers(0, 52, tokens)
    with ShardWriter(
        folder / "train/shard-00000.h5", "t", "0" * 64, vocab_size=53, eod_id=52
    ) as writer:
        writer.write(ids, np.array([tokens]))
    (folder / "config.toml").write_text(CONFIG)
    return folder


class Run:
    """One training: its run directory in `folder`, and what is set beside `config.toml`."""

    def __init__(self, folder: Path, name: str, *settings: str) -> None:
        self.folder, self.path = folder, folder / "runs" / name
        self.settings = (f"run.name={name}", *settings)
        self.job = ""
        self.cluster: Cluster | None = None

    def arguments(self) -> list[str]:
        """Return the arguments of `ptdmpi train`."""
        options = [word for setting in self.settings for word in ("--set", setting)]
        return ["config.toml", *options]

    def undisturbed(self) -> None:
        """Train to the end outside of Slurm."""
        mpirun(2, ["-m", "ptdmpi", "train", *self.arguments()], cwd=self.folder, timeout_s=600)

    def submit(self, cluster: Cluster, *options: str, template: str = TEMPLATE, **env: str) -> None:
        """Hand the run to Slurm by the template, as a user does."""
        command = ["sbatch", "--parsable", f"--output={self.path.name}-%j.log", *MACHINE, *options]
        script = str(ROOT / "jobs" / template)
        virtual = {**self._environment(), **env}
        done = cluster.run(*command, script, *self.arguments(), cwd=self.folder, env=virtual)
        self.job, self.cluster = done.stdout.strip(), cluster

    def submit_by_command(self, cluster: Cluster) -> None:
        """Hand the run to Slurm by `ptdmpi submit`."""
        (self.folder / "virtual.toml").write_text(SITE)
        command = [sys.executable, "-m", "ptdmpi", "submit", *self.arguments(), "--nodes", "2"]
        virtual = {**self._environment(), "XDG_CONFIG_HOME": str(self.folder)}
        site = ("--site", "virtual.toml", "--now")
        done = cluster.run(*command, *site, cwd=self.folder, env=virtual)
        self.job, self.cluster = done.stdout.split()[-1], cluster

    @staticmethod
    def _environment() -> dict[str, str]:
        return {
            "PTDMPI_HOME": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "VIRTUAL_ENV": sys.prefix,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            # the virtual nodes share this machine's cores, but a rank has its slot on each
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": "slot",
        }

    @property
    def log(self) -> str:
        """What the job has written so far, all attempts."""
        path = self.folder / f"{self.path.name}-{self.job}.log"
        return path.read_text() if path.exists() else ""

    @property
    def step(self) -> int:
        """The last step that was done; 0 before the first."""
        with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
            return json.loads((self.path / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        return 0

    @property
    def saved(self) -> str:
        """Return the name of the newest checkpoint; empty: none."""
        latest = self.path / "checkpoints/latest"
        return latest.read_text().strip() if latest.exists() else ""

    def wait_for_step(self, step: int, limit_s: float = START_LIMIT_S) -> None:
        """Wait until the run has done `step`."""
        self._wait(lambda: self.step >= step, limit_s, f"step {step}")

    def wait_for_log(self, text: str, limit_s: float = 120.0) -> None:
        """Wait until the job's log contains `text`."""
        self._wait(lambda: text in self.log, limit_s, f"'{text}' in the log")

    def wait_for_attempt(self, number: int, limit_s: float = 120.0) -> float:
        """Until the first step after the start `number` of the job's ranks; the seconds waited."""
        begun = "parameters, vocabulary"  # the greeting of rank 0
        waited = self._wait(
            lambda: self.log.count(begun) >= number, limit_s, f"attempt {number} starts"
        )
        # On resuming, the records after the checkpoint have been dropped before the greeting.
        resumed = self.step
        return waited + self._wait(lambda: self.step > resumed, limit_s, "the next step")

    def _wait(self, condition, limit_s: float, what: str) -> float:
        try:
            return wait_until(condition, limit_s, what)
        except TimeoutError as error:
            # a job that was never started has no log: Slurm says why
            known = self.cluster.job(self.job) if self.cluster else {}
            state = " ".join(f"{k}={known.get(k)}" for k in ("JobState", "Reason", "Restarts"))
            raise AssertionError(f"{error}; {state}\n{self.log}") from None


def tensors(checkpoint: Path) -> dict[str, bytes]:
    """The bits of each tensor of a checkpoint, put together from its pieces."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    whole = {}
    for name, tensor in manifest["tensors"].items():
        values = np.full(tensor["shape"], np.nan, dtype=tensor["dtype"])
        for piece in tensor["pieces"]:
            box = tuple(slice(*ends) for ends in zip(piece["start"], piece["stop"], strict=True))
            with safe_open(checkpoint / piece["file"], framework="np") as file:
                values[box] = file.get_tensor(piece["key"])
        whole[name] = values.tobytes()
    return whole


def assert_same_bits(run: Run, twin: Run) -> None:
    """The newest checkpoints of both runs are of the same step and hold the same bits."""
    assert run.saved == twin.saved
    ours, theirs = (tensors(each.path / "checkpoints" / each.saved) for each in (run, twin))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
