"""Kill ranks of every kind of run under `ptdmpi run`, which starts the ranks again, and count the
lost runs.

    python -m benchmarks.faults.every_kind [--deaths 500] [--minutes 60] [--folder F] [--kinds zb-v]

The module `kinds.py` lists the kinds of runs. In each run, processes are killed up to 20 times, at
random moments: one rank, all ranks, a rank while the ranks start, or the launcher. After each
fault, the job must continue by itself until the run is complete. The losses and the last state must
be bitwise equal to those of an undisturbed run. Runs of the same kind continue alternately from
checkpoints and from copies of the state in memory. The next run is always of the kind with the
fewest deaths so far. With the option --folder, the results stay in the file `results.jsonl` of this
folder, and a further call adds its results to this file.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.deaths import (
    FAULTS,
    IN_A_START,
    Death,
    KilledRun,
    append,
    count,
    runs_in,
    table,
)
from benchmarks.faults.kinds import STEPS, every_kind, prepare_all, require_bases
from benchmarks.faults.training import (
    StartedRun,
    Way,
    deviation,
    records_deviate,
)
from benchmarks.launch import start
from ptdmpi.supervise import guard
from ptdmpi.supervise.progress import RunProgress

LIMIT_S = 240.0
DEATHS = 20  # Maximum number of deaths of a run.
LIFE_S = 0.2  # Maximum time in seconds from a new step to the next death.
START_S = 4.0  # Maximum time in seconds from a death to a death in the next start.
NOWHERE = ("none", 1, 0)


class SupervisedRun:
    """A run that `ptdmpi run` supervises."""

    def __init__(self, folder: Path, way: Way, run: Path, copies: bool) -> None:
        self.run = run
        self.output = folder / "supervised.txt"
        self.progress = RunProgress(run, STEPS)
        settings = [*way.settings, f"run.dir={run}", "run.stall_s=60"]
        if copies:
            settings += ["checkpoint.memory_every_steps=1", "checkpoint.every_steps=0"]
        options = [word for setting in settings for word in ("--set", setting)]
        # `--restarts` limits the consecutive restarts without a new step. Allow many, because the
        # benchmark also kills ranks while they start, before they train a step.
        limits = ["-n", str(way.ranks), "--restarts", str(2 * DEATHS)]
        command = [sys.executable, "-m", "ptdmpi", "run", *limits, *options]
        with open(self.output, "w") as file:
            self.process = start([*command, "config.toml"], file, cwd=folder)

    def wait_for(self, step: int, limit_s: float = LIMIT_S) -> bool:
        """Wait until `step` is recorded. Return False if the job ends first, or if `step` is not
        recorded within `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end and self.process.poll() is None:
            if self.progress.newest().step >= step:
                return True
            time.sleep(0.01)
        return False

    def victims(self, fault: str, choice: random.Random) -> list[int]:
        """Return the ids of the processes that must be killed now to cause the fault `fault`; [] if
        no such process exists."""
        if fault == "launcher":
            return self._launchers()
        ranks = self.ranks()
        if fault == "all ranks" or not ranks:
            return ranks
        return [choice.choice(ranks)]

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks. The ranks are recognized by the run directory in
        their command lines."""
        ranks = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                variables = (process / "environ").read_bytes()
                if (
                    f"run.dir={self.run}".encode() in words
                    and b"OMPI_COMM_WORLD_RANK=" in variables
                ):
                    ranks.append(int(process.name))
        return ranks

    def _launchers(self) -> list[int]:
        """Return a list with the process id of the launcher, or an empty list if the launcher has
        ended. The launcher is the child of `ptdmpi run` that is not its guard
        (`ptdmpi.supervise.guard`)."""
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}")
        launchers = []
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                if guard.__file__.encode() not in words:
                    launchers.append(int(child))
        return launchers

    def wait(self) -> int:
        """Wait until the job has ended, and return its exit code. A job that takes too long is
        killed."""
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            for pid in [*self.ranks(), *self._launchers()]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
            return self.process.wait()


def killed(job: SupervisedRun, choice: random.Random) -> list[Death]:
    """Kill processes of a run until it has died DEATHS times, has ended, or records no new step in
    time. Return the list of its deaths."""
    deaths: list[Death] = []
    furthest = 0
    died_s = 0.0
    while len(deaths) < DEATHS:
        fault = choice.choices(list(FAULTS), list(FAULTS.values()))[0]
        if fault == IN_A_START:
            # wait for a random time, but at most until the first new step: on a fast machine, the
            # run could otherwise be complete before the kill
            job.wait_for(furthest + 1, choice.uniform(0.0, START_S))
        # wait for step `furthest` + 2, because the run may have recorded step `furthest` + 1 just
        # before its last death
        elif job.wait_for(furthest + 2):
            if deaths:
                deaths[-1] = Death(deaths[-1].fault, time.monotonic() - died_s)
            time.sleep(choice.uniform(0.0, LIFE_S))
        else:
            break
        victims = job.victims(fault, choice)
        if job.process.poll() is not None:
            break
        furthest = max(furthest, job.progress.newest().step)
        reached = [_kill(pid) for pid in victims]
        if any(reached):
            died_s = time.monotonic()
            deaths.append(Death(fault, None))
    return deaths


def _kill(pid: int) -> bool:
    """Kill a process. Return False if the process had already ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def trial(folder: Path, way: Way, choice: random.Random, copies: bool) -> KilledRun:
    """Kill processes of one run of the kind `way`, and compare the finished run with an undisturbed
    run. If `copies` is True, the ranks continue from copies in memory, otherwise from
    checkpoints."""
    reference = folder / f"reference-{way.name}"
    require_bases(folder, way)
    if not (reference / "done").exists():
        undisturbed = StartedRun(folder, way, reference, NOWHERE)
        if undisturbed.wait() != 0:
            raise RuntimeError(f"{way.name}: the undisturbed run failed:\n{undisturbed.text()}")
    run = folder / f"run-{way.name}"
    shutil.rmtree(run, ignore_errors=True)
    job = SupervisedRun(folder, way, run, copies)
    deaths = killed(job, choice)
    code = job.wait()
    why = f"exit code {code}" if code else ""
    why = why or deviation(run, reference, STEPS) or records_deviate(run, reference) or ""
    if why:
        kept = folder / f"lost-{way.name}-{time.time_ns():x}"
        if run.exists():
            run.rename(kept)
        else:  # the job has ended before a rank made the folder
            kept.mkdir()
        shutil.copy(job.output, kept / "supervised.txt")
    shutil.rmtree(run, ignore_errors=True)
    return KilledRun(way.name, copies, tuple(deaths), why)


def _next(names: Sequence[str], runs: Sequence[KilledRun]) -> str:
    """Return the kind among `names` with the fewest deaths in `runs`. If several kinds have equally
    few deaths, return the kind with the fewest runs."""

    def tried(name: str) -> tuple[int, int]:
        mine = [run for run in runs if run.kind == name]
        return count(mine), len(mine)

    return min(names, key=tried)


def main() -> None:
    """Kill processes of runs until the requested number of deaths or minutes is reached. The next
    run is always of the kind with the fewest deaths so far."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.every_kind")
    parser.add_argument("--deaths", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", help="some kinds, such as 'zero-3 zb-v'")
    parser.add_argument("--folder", type=Path, help="keep results here, and add to them")
    options = parser.parse_args()
    ways = every_kind()
    names = (options.kinds or " ".join(ways)).split()
    if not set(names) <= ways.keys():
        parser.error(f"--kinds: legal are {' '.join(ways)}")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="ptdmpi-every-kind-"))
    if not (folder / "runs").is_dir():
        prepare_all(folder / "runs")
    results = folder / "results.jsonl"
    runs = runs_in(results)
    end = time.monotonic() + 60 * options.minutes
    while count(runs) < options.deaths and time.monotonic() < end:
        name = _next(names, runs)
        number = sum(run.kind == name for run in runs)
        choice = random.Random(f"{options.seed} {name} {number}")
        runs.append(trial(folder / "runs", ways[name], choice, copies=number % 2 == 0))
        append(results, runs[-1])
        print(runs[-1].line(), flush=True)
    print(f"\n{table(list(ways), runs)}")
    if any(run.why for run in runs):
        sys.exit(f"lost runs are kept in {folder}")
    if options.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
