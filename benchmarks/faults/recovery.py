"""From the death of a rank to the next training step: random kills, with shrink and a restart.

    python -m benchmarks.faults.recovery --trials 10 --restarts 3 --seed 1

A trial trains a small GPT with `reproducible = true`, kills random ranks (SIGKILL) one after the
other at random moments, at times while the others recover, and is clean if the job ends by itself
with exit code 0, every step recorded once, and the losses of the undisturbed run to the bit.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.launch import living_ranks, mpirun, start
from benchmarks.turns import spread
from ptdmpi.data.shard_writer import ShardWriter

STEPS = 60
LIMIT_S = 300.0
POLL_S = 0.002
CONFIG = f"""
[run]
steps = {STEPS}
reproducible = true
[model]
layers = 4
hidden = 64
heads = 4
seq_length = 32
dropout = 0.1
[batch]
global_size = 12
[checkpoint]
every_steps = 10
[data]
valid = "valid"
[log]
validate_every_steps = 15
validate_samples = 12
[[data.train]]
path = "train"
"""


@dataclass(frozen=True)
class Setup:
    """A layout of the started ranks, and how many of them may die."""

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    spare: int = 0
    deaths: int = 1

    @property
    def name(self) -> str:
        data = (self.ranks - self.spare) // (self.tensor * self.pipeline)
        spare = f" + {self.spare} spare" if self.spare else ""
        return f"t={self.tensor},p={self.pipeline},d={data}{spare}, {self.deaths} lost"

    def settings(self) -> list[str]:
        return [
            f"parallel.tensor={self.tensor}",
            f"parallel.pipeline={self.pipeline}",
            f"run.spare_ranks={self.spare}",
        ]


SETUPS = [
    Setup(6, deaths=5),
    Setup(6, pipeline=2, deaths=4),
    Setup(5, spare=2, deaths=3),
    Setup(6, tensor=2, deaths=4),
    Setup(6, tensor=2, pipeline=2, spare=2, deaths=2),
]


@dataclass
class Trial:
    """`seconds`: from a death to the record of a step that was trained after it; `told`: what the
    log says, from the first error to the loop that is ready."""

    setup: str
    deaths: int = 0
    seconds: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    problem: str = ""


class Job:
    """One mpirun of a run. Its ranks are found by their session and their environment."""

    def __init__(self, folder: Path, name: str, setup: Setup, failure: str) -> None:
        self.run = folder / "runs" / name
        self.output = folder / f"{name}.txt"
        options = ["--with-ft", "ulfm"] if failure == "shrink" else []
        words = [f"run.name={name}", f"run.on_failure={failure}", *setup.settings()]
        sets = [word for setting in words for word in ("--set", setting)]
        rank = ["-m", "ptdmpi", "train", "config.toml", *sets]
        command = mpirun(setup.ranks, rank, options)
        with open(self.output, "a") as output:
            self.process = start(command, output, cwd=folder, extra={"PYTHONFAULTHANDLER": "1"})
        self.end = time.monotonic() + LIMIT_S

    def ranks(self) -> dict[int, int]:
        """Process ids of the living ranks by rank."""
        return living_ranks(self.process)

    def steps(self) -> list[int]:
        """The recorded steps; a line that is being written is left out."""
        file = self.run / "metrics.jsonl"
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        records = [json.loads(line) for line in lines]
        return [record["step"] for record in records if "loss" in record]

    def losses(self) -> list[str]:
        file = self.run / "log.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if " lost in step " in line]

    def wait_for(self, ready: Callable[[], bool]) -> bool:
        """Whether `ready` came true before the job ended, or its time."""
        while not ready():
            if self.process.poll() is not None or time.monotonic() > self.end:
                return ready()
            time.sleep(POLL_S)
        return True

    def finish(self) -> str:
        """What is wrong with the end of the job, if anything; a job that hangs is ended."""
        self.wait_for(lambda: self.process.poll() is not None)
        code = self.process.poll()
        if code is None:
            for pid in self.ranks().values():
                os.kill(pid, signal.SIGABRT)  # the ranks write their stacks
            time.sleep(2.0)
            self.process.kill()
            self.process.wait()
            for pid in self.ranks().values():
                os.kill(pid, signal.SIGKILL)
            return "hung"
        return f"exit code {code}" if code else ""


def kill_one(job: Job, setup: Setup, choice: random.Random) -> float:
    """Kill a living rank of those that trained from the start; returns when. (Nobody waits for a
    spare rank: its death is noticed with the next one.)"""
    trained = range(setup.ranks - setup.spare)
    victim = choice.choice([pid for rank, pid in sorted(job.ranks().items()) if rank in trained])
    now = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    return now


def next_step(job: Job, since: float, losses: int, trial: Trial) -> None:
    """Wait for the first step after the loss that is line `losses` of the log; note the time."""
    if not job.wait_for(lambda: len(job.losses()) >= losses):
        return
    line = job.losses()[-1]
    match = re.search(r" from (.*?) of (?:step (\d+)|the start), ([\d.]+) s$", line)
    begin = int(match[2] or 0)
    if begin < STEPS and job.wait_for(lambda: job.steps()[-1:] > [begin]):
        trial.seconds.append(time.monotonic() - since)
    trial.told.append(float(match[3]))
    trial.sources.append(match[1])


def shrink_trial(folder: Path, number: int, setup: Setup, choice: random.Random) -> Trial:
    trial = Trial(setup.name)
    job = Job(folder, f"shrink-{number}", setup, "shrink")
    soon = False
    for death in range(setup.deaths):
        begin = len(job.steps()) + choice.randrange(1, STEPS // 6)
        if not soon:
            job.wait_for(lambda begin=begin: len(job.steps()) >= begin)
        if job.process.poll() is not None:
            break
        time.sleep(choice.uniform(0, 0.3))
        told = len(job.losses())
        since = kill_one(job, setup, choice)
        trial.deaths += 1
        # sometimes the next one dies while the others recover from this one: no time is taken then
        alone, soon = not soon, death + 1 < setup.deaths and choice.random() < 0.25
        if alone and not soon:
            next_step(job, since, told + 1, trial)
    trial.problem = job.finish()
    return trial


def restart_trial(folder: Path, number: int, setup: Setup, choice: random.Random) -> Trial:
    """The launcher ends the others; then the same command again, without any time in a queue."""
    trial = Trial(f"restart, {setup.name}")
    job = Job(folder, f"restart-{number}", setup, "abort")
    job.wait_for(lambda: len(job.steps()) >= choice.randrange(12, STEPS - 25))
    since = kill_one(job, setup, choice)
    trial.deaths += 1
    job.process.wait(LIMIT_S)
    job = Job(folder, f"restart-{number}", setup, "abort")
    # the records behind the checkpoint are gone when the log says so
    if job.wait_for(lambda: "resumed after step" in (job.run / "log.txt").read_text()):
        begin = job.steps()[-1]
        if job.wait_for(lambda: job.steps()[-1] > begin):
            trial.seconds.append(time.monotonic() - since)
    trial.sources.append("checkpoint")
    trial.problem = job.finish()
    return trial


def compare(run: Path, undisturbed: Path) -> str:
    """How the curve differs from the undisturbed one, if it does."""
    keys = ("step", "loss", "grad_norm", "validation_loss")
    curves = []
    for path in (run, undisturbed):
        records = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
        curves.append([{key: record.get(key) for key in keys} for record in records])
    if curves[0] == curves[1]:
        return ""
    pairs = zip(*curves, strict=False)
    first = next((mine for mine, other in pairs if mine != other), "the number of records")
    return f"the curve differs: {first}"


def corpus(folder: Path) -> None:
    (folder / "config.toml").write_text(CONFIG)
    for name, tokens, seed in (("train", 40_000, 1), ("valid", 1000, 2)):
        (folder / name).mkdir()
        ids = np.random.default_rng(seed).integers(0, 252, tokens)
        shard = folder / name / "shard-00000.h5"
        with ShardWriter(shard, "t", "0" * 64, vocab_size=253, eod_id=252) as writer:
            writer.write(ids, np.array([tokens]))


def straight(folder: Path, setup: Setup) -> Path:
    """The undisturbed run of a setup. Its bits depend on t alone."""
    name = f"straight-{setup.tensor}"
    if not (folder / "runs" / name).exists():
        whole = replace(setup, ranks=setup.ranks - setup.spare, spare=0)
        problem = Job(folder, name, whole, "abort").finish()
        if problem:
            raise SystemExit((folder / f"{name}.txt").read_text() + problem)
    return folder / "runs" / name


def table(trials: Sequence[Trial]) -> Iterator[str]:
    yield "| what | jobs | clean | deaths | death to next step: median (min to max) | as logged |"
    yield "|---|---|---|---|---|---|"
    kinds = list(dict.fromkeys(trial.setup for trial in trials))
    groups = [(kind, [trial for trial in trials if trial.setup == kind]) for kind in kinds]
    for kind, group in [*groups, ("all", list(trials))]:
        clean = sum(not trial.problem for trial in group)
        seconds = [value for trial in group for value in trial.seconds]
        told = [value for trial in group for value in trial.told]
        deaths = sum(trial.deaths for trial in group)
        row = [kind, len(group), clean, deaths, spread(seconds, " s"), spread(told, " s")]
        yield f"| {' | '.join(map(str, row))} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    choice = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="ptdmpi-recovery-"))
    corpus(folder)
    trials = []
    for number in range(options.trials + options.restarts):
        setup = SETUPS[number % len(SETUPS)]
        shrinks = number < options.trials
        if not shrinks:
            setup = Setup(4)  # a restart has all ranks again
        undisturbed = straight(folder, setup)
        trial = (shrink_trial if shrinks else restart_trial)(folder, number, setup, choice)
        run = folder / "runs" / f"{'shrink' if shrinks else 'restart'}-{number}"
        trial.problem = trial.problem or compare(run, undisturbed)
        trials.append(trial)
        print(json.dumps(asdict(trial)), flush=True)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
    shrunk, restarted = trials[: options.trials], trials[options.trials :]
    print("\n".join([*table(shrunk), "", *table(restarted)]))
    bad = sum(bool(trial.problem) for trial in trials)
    if bad:
        print(f"{bad} trials were not clean; their output is in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
