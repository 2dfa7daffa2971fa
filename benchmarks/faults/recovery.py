"""The time from the death of a rank to the next step: for runs that continue with fewer ranks, and
for runs that are restarted.

    python -m benchmarks.faults.recovery --trials 10 --seed 1

A trial trains a small GPT with `reproducible = true`. The trial kills random ranks (SIGKILL) one
after another at random moments, sometimes while the other ranks recover from an earlier loss. The
trial is successful if the job ends by itself with exit code 0, has recorded every step once, and
has the same losses, bit by bit, as an undisturbed run.
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
RESTARTS = 3  # number of trials in which all ranks are started again after the death
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
    """A layout of `ranks` started ranks, and the number `deaths` of ranks that a trial kills. The
    last `spare` ranks wait until they replace a lost rank."""

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    spare: int = 0
    deaths: int = 1

    @property
    def name(self) -> str:
        """Return the name of the setup in the table of results."""
        data = (self.ranks - self.spare) // (self.tensor * self.pipeline)
        spare = f" + {self.spare} spare" if self.spare else ""
        return f"t={self.tensor},p={self.pipeline},d={data}{spare}, {self.deaths} lost"

    def settings(self) -> list[str]:
        """Return the settings of the layout, for `--set`."""
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
    """The results of one trial, in which `deaths` ranks were killed. `problem` says why the trial
    failed; it is empty if the trial was successful.

    A death is not timed if another rank dies during the recovery. `seconds` has, for each timed
    death, the time until the run has recorded a step that was trained after the death. `logged` has
    the time that the log reports: from the first error until the training loop is ready. `sources`
    has the source of the state from which the ranks continued.
    """

    setup: str
    deaths: int = 0
    seconds: list[float] = field(default_factory=list)
    logged: list[float] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    problem: str = ""


class Job:
    """The process of mpirun that executes a run. The ranks of the job are recognized by the session
    and the environment of their processes."""

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
        """Return the process ids of the living ranks, by rank."""
        return living_ranks(self.process)

    def steps(self) -> list[int]:
        """Return the numbers of the steps that the run has recorded. A line that is still being
        written is ignored."""
        file = self.run / "metrics.jsonl"
        if not file.exists():
            return []
        records = [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
        return [record["step"] for record in records if "loss" in record]

    def losses(self) -> list[str]:
        """Return the lines of the run's log that report lost ranks."""
        file = self.run / "log.txt"
        if not file.exists():
            return []
        return [line for line in file.read_text().splitlines() if " lost in step " in line]

    def wait_for(self, ready: Callable[[], bool]) -> bool:
        """Wait until `ready` returns True. Return False if the job ends or its time is over before
        `ready` returns True."""
        while not ready():
            if self.process.poll() is not None or time.monotonic() > self.end:
                return ready()
            time.sleep(POLL_S)
        return True

    def finish(self) -> str:
        """Wait until the job ends. Return a text that describes the failure of the job, or "" if it
        was successful. A job that hangs is killed."""
        self.wait_for(lambda: self.process.poll() is not None)
        code = self.process.poll()
        if code is None:
            for pid in self.ranks().values():
                os.kill(pid, signal.SIGABRT)  # this signal makes the ranks write their stacks
            time.sleep(2.0)
            self.process.kill()
            self.process.wait()
            for pid in self.ranks().values():
                os.kill(pid, signal.SIGKILL)
            return "hung"
        return f"exit code {code}" if code else ""


def kill_one(job: Job, setup: Setup, choice: random.Random) -> float:
    """Kill one of the living ranks that have trained since the start, and return the time of the
    kill. (Spare ranks are not killed: no rank waits for a spare rank, so its death would be noticed
    only at the next death.)"""
    trained = range(setup.ranks - setup.spare)
    victim = choice.choice([pid for rank, pid in sorted(job.ranks().items()) if rank in trained])
    now = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    return now


def next_step(job: Job, since: float, losses: int, trial: Trial) -> None:
    """Wait until the log has `losses` lines about lost ranks, and then for the first new step. Add
    to `trial` the seconds from the death, which was at the time `since`, to this step."""
    if not job.wait_for(lambda: len(job.losses()) >= losses):
        return
    line = job.losses()[-1]
    match = re.search(r" from (.*?) of (?:step (\d+)|the start), ([\d.]+) s$", line)
    begin = int(match[2] or 0)
    if begin < STEPS and job.wait_for(lambda: job.steps()[-1:] > [begin]):
        trial.seconds.append(time.monotonic() - since)
    trial.logged.append(float(match[3]))
    trial.sources.append(match[1])


def shrink_trial(folder: Path, number: int, setup: Setup, choice: random.Random) -> Trial:
    """Do a trial of a job that continues after the loss of ranks: kill some of its ranks, and
    return the results."""
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
        before = len(job.losses())
        since = kill_one(job, setup, choice)
        trial.deaths += 1
        # Sometimes the next rank is killed while the other ranks still recover from this death.
        # Then no time is measured for either death.
        alone = not soon
        soon = death + 1 < setup.deaths and choice.random() < 0.25
        if alone and not soon:
            next_step(job, since, before + 1, trial)
    trial.problem = job.finish()
    return trial


def restart_trial(folder: Path, number: int, setup: Setup, choice: random.Random) -> Trial:
    """Do a trial: kill a rank of a job, so that the launcher ends the job, and start the same
    command again immediately, without waiting in a queue."""
    trial = Trial(f"restart, {setup.name}")
    job = Job(folder, f"restart-{number}", setup, "abort")
    job.wait_for(lambda: len(job.steps()) >= choice.randrange(12, STEPS - 25))
    since = kill_one(job, setup, choice)
    trial.deaths += 1
    job.process.wait(LIMIT_S)
    job = Job(folder, f"restart-{number}", setup, "abort")
    # when this line is in the log, the records after the checkpoint have been removed
    if job.wait_for(lambda: "resumed after step" in (job.run / "log.txt").read_text()):
        begin = job.steps()[-1]
        if job.wait_for(lambda: job.steps()[-1] > begin):
            trial.seconds.append(time.monotonic() - since)
    trial.sources.append("checkpoint")
    trial.problem = job.finish()
    return trial


def compare(run: Path, undisturbed: Path) -> str:
    """Return the first difference from the loss curve of the undisturbed run, or "" if the curves
    are equal."""
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
    """Write the configuration and the data of all runs into `folder`."""
    (folder / "config.toml").write_text(CONFIG)
    for name, tokens, seed in (("train", 40_000, 1), ("valid", 1000, 2)):
        (folder / name).mkdir()
        ids = np.random.default_rng(seed).integers(0, 252, tokens)
        shard = folder / name / "shard-00000.h5"
        with ShardWriter(shard, "t", "0" * 64, vocab_size=253, eod_id=252) as writer:
            writer.write(ids, np.array([tokens]))


def straight(folder: Path, setup: Setup) -> Path:
    """Return the run directory of the undisturbed run with which trials of a setup are compared.
    The bits of the results depend only on the tensor-parallel size, so setups with the same size
    share an undisturbed run."""
    name = f"straight-{setup.tensor}"
    if not (folder / "runs" / name).exists():
        whole = replace(setup, ranks=setup.ranks - setup.spare, spare=0)
        problem = Job(folder, name, whole, "abort").finish()
        if problem:
            raise SystemExit((folder / f"{name}.txt").read_text() + problem)
    return folder / "runs" / name


def table(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield the lines of a Markdown table of the trials, with a row for each setup and a row for
    all trials."""
    yield "| what | jobs | clean | deaths | death to next step: median (min to max) | as logged |"
    yield "|---|---|---|---|---|---|"
    kinds = list(dict.fromkeys(trial.setup for trial in trials))
    groups = [(kind, [trial for trial in trials if trial.setup == kind]) for kind in kinds]
    for kind, group in [*groups, ("all", list(trials))]:
        clean = sum(not trial.problem for trial in group)
        seconds = [value for trial in group for value in trial.seconds]
        logged = [value for trial in group for value in trial.logged]
        deaths = sum(trial.deaths for trial in group)
        row = [kind, len(group), clean, deaths, spread(seconds, " s"), spread(logged, " s")]
        yield f"| {' | '.join(map(str, row))} |"


def main() -> int:
    """Run the trials, print them and their tables, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    choice = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="ptdmpi-recovery-"))
    corpus(folder)
    trials = []
    for number in range(options.trials + RESTARTS):
        if number < options.trials:
            setup = SETUPS[number % len(SETUPS)]
            undisturbed = straight(folder, setup)
            trial = shrink_trial(folder, number, setup, choice)
            run = folder / "runs" / f"shrink-{number}"
        else:
            setup = Setup(4)  # a restart trial kills one rank, and then starts all ranks again
            undisturbed = straight(folder, setup)
            trial = restart_trial(folder, number, setup, choice)
            run = folder / "runs" / f"restart-{number}"
        trial.problem = trial.problem or compare(run, undisturbed)
        trials.append(trial)
        print(json.dumps(asdict(trial)), flush=True)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
    shrunk = trials[: options.trials]
    restarted = trials[options.trials :]
    print("\n".join([*table(shrunk), "", *table(restarted)]))
    bad = sum(bool(trial.problem) for trial in trials)
    if bad:
        print(f"{bad} trials were not clean; their output is in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
