"""Kill ranks of every kind of run under `ptdmpi run`, which starts them again, and count what is
lost.

    python -m benchmarks.faults.every_kind [--deaths 500] [--minutes 60] [--seed 1] [--kinds "zb-v"]

The kinds come from the tables of the program: each data-parallel method, compressor, ZeRO stage,
schedule, adapter and task. A new name in a table is therefore tested, too; if its settings are
incomplete, the list is refused with the configuration's error. In each run a rank is killed three
times at random moments. The job must then complete by itself, with the losses and the last state of
an undisturbed run, bit by bit. Most kinds have copies in memory, and every fourth run continues
from checkpoints.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from benchmarks.faults.training import (
    BASE,
    STEPS,
    StartedRun,
    Way,
    deviation,
    losses,
    prepare,
    records_deviate,
    require_base,
)
from benchmarks.launch import start
from ptdmpi.config.adapt import AdaptMethod
from ptdmpi.config.choices import ScheduleName
from ptdmpi.config.methods import CompressorName, MethodName
from ptdmpi.config.section import Section
from ptdmpi.config.sections import ParallelConfig, TaskConfig

LIMIT_S = 240.0
DEATHS = 3  # number of deaths in a run
NOWHERE = ("none", 1, 0)
# The settings that a name of a table needs in addition.
METHODS: Mapping[str, tuple[str, ...]] = {
    "local": ("data_parallel.local_steps=2",),
    "compressed": ("data_parallel.compressor=sign",),
}
SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "interleaved": ("parallel.virtual=2", "model.layers=4"),
    "zb-v": ("parallel.virtual=2", "model.layers=4"),
}
ADAPTED = (f"adapt.base={BASE}",)
TASKS: Mapping[str, tuple[str, ...]] = {
    "classification": ('task.labels=["a","b"]', 'data.train=[{path="labelled.jsonl"}]'),
    "choice": ("task.choices=2", 'data.train=[{path="choices.jsonl"}]', "batch.micro_size=2"),
}


def names_of(literal: object) -> tuple[str, ...]:
    """Return the names that a literal type lists, without "none"."""
    return tuple(name for name in get_args(literal) if name != "none")


def every_kind() -> dict[str, Way]:
    """Return a layout for each kind of run, by the kind's name."""
    ways: dict[str, Way] = {}

    def add(name: str, ranks: int, *settings: str) -> None:
        ways[name] = Way(name, ranks, settings)

    for method in names_of(MethodName):
        add(method, 2, f"data_parallel.method={method}", *METHODS.get(method, ()))
    for compressor in names_of(CompressorName):
        words = ("data_parallel.method=compressed", f"data_parallel.compressor={compressor}")
        add(f"compressed-{compressor}", 2, *words)
    for stage in range(1, _most(ParallelConfig, "zero") + 1):
        add(f"zero-{stage}", 2 if stage % 2 else 4, f"parallel.zero={stage}")
    for schedule in names_of(ScheduleName):
        words = ("parallel.pipeline=2", f"parallel.schedule={schedule}")
        add(schedule, 2, *words, *SCHEDULES.get(schedule, ()))
    for adapter in names_of(AdaptMethod):
        add(adapter, 2, f"adapt.method={adapter}", *ADAPTED)
    for task in names_of(TaskConfig.model_fields["kind"].annotation):
        add(task, 2, f"task.kind={task}", "task.tokenizer=bytes", *TASKS[task])
    add("tensor", 2, "parallel.tensor=2")
    add("three", 3, "batch.global_size=6")
    return ways


def _most(section: type[Section], key: str) -> int:
    """Return the greatest legal value of a configuration key."""
    limits = [getattr(limit, "le", None) for limit in section.model_fields[key].metadata]
    return next(limit for limit in limits if limit is not None)


@dataclass
class Count:
    """The outcome for one kind: the numbers of deaths and runs, what was lost, and the seconds from
    each death to the next new step."""

    deaths: int = 0
    runs: int = 0
    lost: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def prepare_all(folder: Path) -> None:
    """Write the configuration, tokens and labelled texts into `folder`."""
    prepare(folder)
    texts = [f"text {number}" for number in range(64)]
    labelled = [{"text": text, "label": "ab"[len(text) % 2]} for text in texts]
    choices = [{"context": text, "choices": ["x", "y"], "answer": 0} for text in texts]
    for name, rows in (("labelled", labelled), ("choices", choices)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)


class SupervisedRun:
    """A run that `ptdmpi run` supervises."""

    def __init__(self, folder: Path, way: Way, run: Path, copies: bool) -> None:
        self.run = run
        self.output = folder / "supervised.txt"
        settings = [*way.settings, f"run.dir={run}", "run.stall_s=60"]
        if copies:
            settings += ["checkpoint.memory_every_steps=1", "checkpoint.every_steps=0"]
        options = [word for setting in settings for word in ("--set", setting)]
        command = [sys.executable, "-m", "ptdmpi", "run", "-n", str(way.ranks), *options]
        with open(self.output, "w") as file:
            self.process = start([*command, "config.toml"], file, cwd=folder)

    def steps(self) -> int:
        """Return the last recorded step."""
        return losses(self.run)[-1][0] if (self.run / "metrics.jsonl").is_file() else 0

    def wait_for(self, step: int) -> bool:
        """Wait until `step` is recorded. Return False if the job has ended before."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if self.steps() >= step:
                    return True
            except (ValueError, IndexError):  # the line is still being written
                pass
            time.sleep(0.01)
        return False

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks. The ranks are recognized by the run directory in
        their command lines."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                variables = (process / "environ").read_bytes()
            except OSError:
                continue
            if f"run.dir={self.run}".encode() in words and b"OMPI_COMM_WORLD_RANK=" in variables:
                found.append(int(process.name))
        return found

    def wait(self) -> int:
        """Return the exit code of the job. A job that takes too long is killed."""
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            for pid in self.ranks():
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            return self.process.wait()


def trial(folder: Path, way: Way, choice: random.Random, count: Count, copies: bool) -> None:
    """Kill ranks of one run three times, and compare the run with an undisturbed one."""
    reference = folder / f"reference-{way.name}"
    if any("adapt.base" in setting for setting in way.settings):
        require_base(folder)
    if not (reference / "done").exists():
        undisturbed = StartedRun(folder, way, reference, NOWHERE)
        if undisturbed.wait() != 0:
            raise RuntimeError(f"{way.name}: the undisturbed run failed:\n{undisturbed.text()}")
    run = folder / f"run-{way.name}"
    shutil.rmtree(run, ignore_errors=True)
    job = SupervisedRun(folder, way, run, copies)
    killed = 0
    for _ in range(DEATHS):
        if not job.wait_for(job.steps() + choice.randrange(1, STEPS // (DEATHS + 1))):
            break
        time.sleep(choice.uniform(0.0, 0.05))
        ranks = job.ranks()
        if not ranks or job.process.poll() is not None:
            break
        victims = [choice.choice(ranks)]
        if choice.random() < 0.25:
            victims = ranks
        step = job.steps()
        begin = time.monotonic()
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        killed += 1
        if job.wait_for(step + 2):  # one step may not have been complete
            count.seconds.append(time.monotonic() - begin)
    code = job.wait()
    count.runs += 1
    count.deaths += killed
    why = f"exit code {code}" if code else ""
    why = why or deviation(run, reference) or records_deviate(run, reference) or ""
    if why:
        count.lost.append(why)
        shutil.copy(job.output, folder / f"lost-{way.name}-{count.runs}.txt")
    shutil.rmtree(run, ignore_errors=True)


def table(counts: Mapping[str, Count]) -> str:
    """Return the counts as text, one row for each kind."""
    lines = [f"{'kind':24} {'deaths':>6} {'runs':>5} {'lost':>5}  death to next step, median s"]
    seconds: Sequence[float] = [s for count in counts.values() for s in count.seconds]
    for name, count in [*counts.items(), ("all", _sum(counts))]:
        middle = f"{statistics.median(count.seconds):.1f}" if count.seconds else "-"
        lines.append(f"{name:24} {count.deaths:6} {count.runs:5} {len(count.lost):5}  {middle}")
    if seconds:
        lines.append(f"death to next step: {min(seconds):.1f} to {max(seconds):.1f} s")
    return "\n".join(lines)


def _sum(counts: Mapping[str, Count]) -> Count:
    whole = Count()
    for count in counts.values():
        whole.deaths += count.deaths
        whole.runs += count.runs
        whole.lost += count.lost
        whole.seconds += count.seconds
    return whole


def main() -> None:
    """Kill ranks, in random order of kinds, until the number of deaths or the time is reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.every_kind")
    parser.add_argument("--deaths", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", help="some kinds, such as 'zero-3 zb-v'")
    options = parser.parse_args()
    ways = every_kind()
    names = (options.kinds or " ".join(ways)).split()
    if not set(names) <= ways.keys():
        parser.error(f"--kinds: legal are {' '.join(ways)}")
    folder = Path(tempfile.mkdtemp(prefix="ptdmpi-every-kind-"))
    prepare_all(folder / "runs")
    choice = random.Random(options.seed)
    counts = {name: Count() for name in names}
    end = time.monotonic() + 60 * options.minutes
    number = 0
    while sum(count.deaths for count in counts.values()) < options.deaths:
        if number % len(names) == 0:
            choice.shuffle(names)
        name = names[number % len(names)]
        if time.monotonic() > end:
            break
        number += 1
        trial(folder / "runs", ways[name], choice, counts[name], copies=number % 4 != 0)
        print(f"{name}: {counts[name]}", flush=True)
    print(f"\n{table(counts)}")
    if any(count.lost for count in counts.values()):
        sys.exit(f"lost runs are kept in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
