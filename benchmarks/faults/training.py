"""The training runs into which faults are injected: their data, their processes, and the comparison
with a run without faults."""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.launch import living_ranks, mpirun, start
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint import examine as check
from ptdmpi.config import InputError
from ptdmpi.data.shard_writer import ShardWriter

LIMIT_S = 600.0
STEPS = 40
EVERY_STEPS = 4
VOCAB_SIZE = 23
BASE = "base"  # name of the run directory with the frozen base model of runs with adapters

CONFIG = f"""
[run]
steps = {STEPS}
[model]
layers = 2
hidden = 16
heads = 2
seq_length = 8
dropout = 0.1
[batch]
global_size = 8
[optimizer]
learning_rate = 1e-3
[[data.train]]
path = "train"
[checkpoint]
every_steps = {EVERY_STEPS}
keep = 2
keep_every = 12
"""


@dataclass(frozen=True)
class Way:
    """A case: a configuration for training runs on `ranks` ranks. `settings` (KEY=VALUE) are passed
    to `ptdmpi train` by `--set`, and `options` are options of mpirun."""

    name: str
    ranks: int
    settings: tuple[str, ...]
    options: tuple[str, ...] = ()


def prepare(folder: Path) -> None:
    """Write a configuration and a small corpus into a folder."""
    (folder / "train").mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG)
    ids = np.random.default_rng(1).integers(0, VOCAB_SIZE - 1, 4000)
    path = folder / "train/shard-00000.h5"
    with ShardWriter(
        path, "torture", "0" * 64, vocab_size=VOCAB_SIZE, eod_id=VOCAB_SIZE - 1
    ) as writer:
        writer.write(ids, np.array([len(ids)]))


class StartedRun:
    """A process of `ptdmpi train` for a case. Another start with the same run directory resumes the
    run. `death` is the (place, count, rank) at which a rank kills itself (see
    `benchmarks.faults.rank`)."""

    def __init__(self, folder: Path, case: Way, run: Path, death: tuple[str, int, int]) -> None:
        self.output = folder / "output.txt"
        place, count, rank = death
        words = [*case.settings, f"run.dir={run}"]
        options = [word for setting in words for word in ("--set", setting)]
        kill = ("-m", "benchmarks.faults.rank", place, str(count), str(rank))
        command = mpirun(case.ranks, [*kill, "train", "config.toml", *options], case.options)
        with open(self.output, "w") as file:
            self.process = start(command, file, cwd=folder)

    def text(self) -> str:
        """Return the text that the run has printed so far."""
        return self.output.read_text(errors="replace")

    def saved(self) -> int:
        """Return the newest step that this process has reported as saved; 0 if it has reported
        none."""
        steps = re.findall(r"^saved \S*step-(\d{8}) ", self.text(), re.MULTILINE)
        return max(map(int, steps), default=0)

    def wait_for_step(self, step: int) -> None:
        """Wait until the output reports this step, until the run has ended, or for at most LIMIT_S
        seconds."""
        end = time.monotonic() + LIMIT_S
        while self.process.poll() is None and time.monotonic() < end:
            steps = re.findall(r"^step +(\d+)/", self.text(), re.MULTILINE)
            if steps and int(steps[-1]) >= step:
                return
            time.sleep(0.002)

    def wait(self) -> int:
        """Wait for the end of the run, and return its exit code. A run that takes longer than
        LIMIT_S seconds is killed and reported as failed."""
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return self.end()

    def end(self) -> int:
        """Kill all processes of the run, and return the exit code."""
        self.kill(self.ranks())
        self.process.kill()
        return self.process.wait()

    def ranks(self) -> list[int]:
        """Return the process ids of the living ranks."""
        return sorted(living_ranks(self.process).values())

    def kill(self, ranks: list[int]) -> None:
        """Send SIGKILL to processes, by their ids."""
        for rank in ranks:
            try:
                os.kill(rank, signal.SIGKILL)
            except ProcessLookupError:
                continue


def require_base(folder: Path) -> None:
    """Train the model that is the frozen base of runs with adapters, for one step. Do nothing if
    the model exists already."""
    if not (folder / BASE).is_dir():
        made = StartedRun(folder, Way(BASE, 1, ("run.steps=1",)), folder / BASE, ("none", 1, 0))
        if made.wait() != 0:
            raise RuntimeError(f"the base was not trained:\n{made.text()}")


def newest_sound(run: Path) -> int:
    """Return the step of a run's newest undamaged checkpoint; 0 if no checkpoint is undamaged."""
    for path in reversed(files.checkpoints_in(run / "checkpoints")):
        if not check.problems(path):
            return files.step_of(path)
    return 0


def losses(run: Path) -> list[tuple[int, float]]:
    """Return the pairs (step, loss) that the run has recorded in `metrics.jsonl`, in the order of
    the file."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def deviation(run: Path, reference: Path, steps: int = STEPS) -> str | None:
    """Compare a run's checkpoint of the last step, `steps`, with the same checkpoint of an
    undisturbed run. Return a text about the differences; None if all bits are equal."""
    last = files.name_of(steps)
    try:
        changed = check.differences(reference / "checkpoints" / last, run / "checkpoints" / last)
    except InputError as error:
        return str(error)
    if changed:
        first = changed[0]
        return f"{len(changed)} tensors differ, {first.name} by {first.greatest_absolute}"
    return None


def records_deviate(run: Path, reference: Path) -> str | None:
    """Return a description of the difference if the recorded steps or losses of a run differ from
    those of an undisturbed run. Return None if they are equal. The undisturbed run has recorded
    each step exactly once."""
    return None if losses(run) == losses(reference) else "metrics.jsonl differs"
